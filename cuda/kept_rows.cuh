// Kept rows one by one: what the kernels share that multiply vector-wise (1, L) and block-wise (b, b) weights with
// feature-major activations as a dense product over all kept rows of a column block,
//
//   yᵀ[o, t] = act(scale[o] * sum_r values[r, o] xᵀ[row(r), t] + bias[o])      r: the kept rows of o's column block
//
// Layouts. values [batch, windows, out_blocks, q, bk, bn]: runs of bn elements. x [batch, in_features, tokens] and y
// [batch, out_features, tokens] are contiguous along tokens.
#ifndef JAX_NMSPARSE_CUDA_KEPT_ROWS_CUH_
#define JAX_NMSPARSE_CUDA_KEPT_ROWS_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/kept_units.cuh"
#include "cuda/launch.h"

namespace nmsparse::cuda::kept_rows {

// A Config C has kColumns and kTokens (of a tile) and kDepth (kept rows of a step).
struct Arguments {
  Geometry geometry;
  const void* x;
  const void* values;
  const uint32_t* mask;
  Epilogue epilogue;
  Result y;
  int32_t bk;
  int32_t kept;      // rows that a window keeps of a column block
  int32_t all_kept;  // of all windows
  int32_t steps;     // of a tile
  int32_t column_tiles;
  int32_t token_tiles;
  int32_t tiles;
  int32_t token_group;            // token tiles that walk the columns together, so that their x stays in the L2 cache
  int32_t x_pitch, values_pitch;  // bytes between rows
};

// Where a kept row lies: its row of x and its run of values, both counted in rows; negative where it does not exist.
struct Place {
  int32_t x, values;
};

template <class C>
struct Position {
  int32_t batch, block, column, token;

  __device__ static Position At(const Arguments& a, int32_t index) {
    const int32_t per_batch = a.column_tiles * a.token_tiles;
    const int32_t in_batch = index % per_batch;
    const int32_t first = in_batch / (a.token_group * a.column_tiles) * a.token_group;
    const int32_t group = min(a.token_group, a.token_tiles - first);
    const int32_t in_group = in_batch % (a.token_group * a.column_tiles);
    const int32_t column = in_group / group * C::kColumns;
    return {index / per_batch, column / a.geometry.bn, column, (first + in_group % group) * C::kTokens};
  }
};

// The row of x that kept row `in_window` of a window is, given the window's mask word.
__device__ __forceinline__ int32_t RowOf(const Arguments& a, uint32_t word, int32_t window, int32_t in_window) {
  const int32_t units = static_cast<int32_t>(a.geometry.window_units);
  return (window * units + UnitOfRank(word, in_window / a.bk, units)) * a.bk + in_window % a.bk;
}

// One result with plain float32 products.
inline __device__ __noinline__ float SumPlainly(const Arguments& a, int32_t batch, int32_t column, int32_t token) {
  const Geometry& g = a.geometry;
  const float* const x = static_cast<const float*>(a.x) + batch * g.in_features * g.tokens + token;
  const float* const values = static_cast<const float*>(a.values) + batch * block::ValuesPerBatch(g) + column % g.bn;
  const int32_t block = column / g.bn;
  float sum = 0.0f;
  for (int32_t window = 0; window < g.windows; ++window) {
    const uint32_t word = __ldg(a.mask + (batch * g.windows + window) * g.out_blocks + block);
    for (int32_t i = 0; i < a.kept; ++i) {
      const int32_t row = RowOf(a, word, window, i);
      if (row >= g.in_features) continue;
      sum = fmaf(values[((window * g.out_blocks + block) * a.kept + i) * g.bn], x[row * g.tokens], sum);
    }
  }
  return sum;
}

// A kept row of the weight, and the mask word of its window and column block; window < 0 where there is none.
struct Kept {
  int32_t window = -1, in_window, block;
  uint32_t word;
};

// Kept row `position` of a tile.
template <class C>
__device__ __forceinline__ Kept KeptAt(const Arguments& a, const Position<C>& at, int32_t position) {
  const Geometry& g = a.geometry;
  const int32_t window = position / a.kept;
  return {window, position - window * a.kept, at.block,
          __ldg(a.mask + (at.batch * g.windows + window) * g.out_blocks + at.block)};
}

// Row `row` of step `step`, counted over the tiles that this block walks with a stride of the grid.
template <class C>
__device__ __forceinline__ Kept FindKept(const Arguments& a, int32_t step, int row) {
  const int32_t tile = static_cast<int32_t>(blockIdx.x + step / a.steps * gridDim.x);
  const int32_t position = step % a.steps * C::kDepth + row;
  if (tile >= a.tiles || position >= a.all_kept) return {};
  return KeptAt(a, Position<C>::At(a, tile), position);
}

__device__ __forceinline__ Place PlaceOf(const Arguments& a, const Kept& kept) {
  if (kept.window < 0) return {-1, -1};
  const int32_t x = RowOf(a, kept.word, kept.window, kept.in_window);
  if (x >= a.geometry.in_features) return {-1, -1};
  return {x, (kept.window * static_cast<int32_t>(a.geometry.out_blocks) + kept.block) * a.kept + kept.in_window};
}

inline int64_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : dtype == DType::kS8 ? 1 : 2; }

// What these kernels can be asked for; operand dtypes aside.
inline bool Supports(const Problem& problem, int columns) {
  const Geometry& g = problem.geometry;
  const DType x = problem.x.dtype, y = problem.result.dtype;
  const int64_t bytes = SizeOf(x);
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 31); };
  const bool result =
      y == DType::kF32 || y == DType::kBF16 || y == DType::kF16 || (x == DType::kS8 && y == DType::kS32);
  return problem.values.dtype == x && result && g.window_units <= kMaskBits && g.bn % columns == 0 &&
         g.tokens * bytes % 16 == 0 && fits(g.tokens * bytes) && fits(g.bn * bytes) &&
         fits(g.windows * g.rows_per_window()) && fits(g.windows * g.out_blocks * g.q * g.bk) &&
         fits(g.out_blocks * g.bn) && fits(g.batch) && IsAligned(problem.x.data) && IsAligned(problem.values.data) &&
         IsAligned(problem.result.data);
}

// One block for each of `blocks` at most, persistent. False where there are too many tiles.
template <class C>
bool FillArguments(const Problem& problem, int64_t blocks, Arguments* a) {
  constexpr int kTokenGroup = 8;
  const Geometry& g = problem.geometry;
  a->geometry = g;
  a->x = problem.x.data;
  a->values = problem.values.data;
  a->mask = problem.mask;
  a->epilogue = problem.epilogue;
  a->y = problem.result;
  a->bk = static_cast<int32_t>(g.bk);
  a->kept = g.q * g.bk;
  a->all_kept = static_cast<int32_t>(g.windows * a->kept);
  a->steps = static_cast<int32_t>(CeilDiv(a->all_kept, C::kDepth));
  a->column_tiles = static_cast<int32_t>(CeilDiv(g.out_features, C::kColumns));
  a->token_tiles = static_cast<int32_t>(CeilDiv(g.tokens, C::kTokens));
  a->token_group = kTokenGroup;
  const int64_t bytes = SizeOf(problem.x.dtype);
  a->x_pitch = static_cast<int32_t>(g.tokens * bytes);
  a->values_pitch = static_cast<int32_t>(g.bn * bytes);
  const int64_t tiles = g.batch * a->column_tiles * a->token_tiles;
  if (tiles > kMaxBlocks - blocks) return false;
  a->tiles = static_cast<int32_t>(tiles);
  return true;
}

}  // namespace nmsparse::cuda::kept_rows

#endif  // JAX_NMSPARSE_CUDA_KEPT_ROWS_CUH_
