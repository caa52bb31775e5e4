// Many tokens times float32 vector-wise (1, L) or block-wise (b, b) weights in full float32, feature-major:
//
//   yᵀ[o, t] = act(scale[o] * sum_r values[r, o] xᵀ[row(r), t] + bias[o])      r: the kept rows of o's column block
//
// Both operands have one line per kept row, of columns and of tokens, as they lie in memory: nothing is transposed.
//
// Layouts. values [batch, windows, out_blocks, q, bk, bn]: runs of bn elements. x [batch, in_features, tokens] and y
//   [batch, out_features, tokens] are contiguous along tokens.
// Step. kDepth kept rows, counted over all windows. Rows that do not exist are zeros in both operands.
// Ownership. A block of 128 threads owns kColumns columns x kTokens tokens, a thread 8 x 16 of them: columns 4 c ... +
//   3 and 16 more on, tokens 4 t ... + 3 and 32 more on, of its warp's 32 x 64; so a warp's reads are runs of 64 and
//   128 bytes. Two blocks share a multiprocessor: one writes results or waits while the other multiplies.
// Shared memory (bytes): kStages x kDepth x 4 x (kColumns + kTokens), columns first; (kStages + 1) x kDepth x 8 places
//   of the kept rows in x and values, listed one step before they are copied, by one warp in turns.
// Synchronisation: cp.async groups of a step each; one barrier of the block a step.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_FMA_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_FMA_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/kept_units.cuh"

namespace nmsparse::cuda::block_fma {

inline constexpr int kThreads = 128;
inline constexpr int kThreadColumns = 8;
inline constexpr int kThreadTokens = 16;
inline constexpr int kWarpColumns = 32;
inline constexpr int kWarpTokens = 128;
inline constexpr int kDepth = 16;

template <int kColumns_, int kTokens_, int kStages_>
struct Config {
  static constexpr int kColumns = kColumns_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kStages = kStages_;
  static constexpr int kLists = kStages + 1;
  static constexpr int kStageFloats = kDepth * (kColumns + kTokens);
  static constexpr int kSharedBytes = kStages * kStageFloats * 4 + kLists * kDepth * 8;
  static_assert(kColumns / kWarpColumns * (kTokens / kWarpTokens) == kThreads / kWarpSize, "warps cover the tile");
};

struct Arguments {
  Geometry geometry;
  const float* x;
  const float* values;
  const uint32_t* mask;
  Epilogue epilogue;
  float* y;
  int32_t kept;      // rows that a window keeps of a column block
  int32_t all_kept;  // of all windows
  int32_t column_tiles;
  int32_t token_tiles;
  int32_t token_group;  // token tiles that walk the columns together, so that their x stays in the L2 cache
};

// Where a kept row lies: its row of x and its run of values, both counted in rows; negative where it does not exist.
struct Place {
  int32_t x, values;
};

template <class C>
class Tile {
 public:
  __device__ Tile(const Arguments& a, float* stages, Place* lists) : a_(a), stages_(stages), lists_(lists) {
    const Geometry& g = a.geometry;
    const int32_t per_batch = a.column_tiles * a.token_tiles;
    const int32_t in_batch = static_cast<int32_t>(blockIdx.x) % per_batch;
    batch_ = static_cast<int32_t>(blockIdx.x) / per_batch;
    const int32_t first = in_batch / (a.token_group * a.column_tiles) * a.token_group;
    const int32_t group = min(a.token_group, a.token_tiles - first);
    const int32_t in_group = in_batch % (a.token_group * a.column_tiles);
    column_ = in_group / group * C::kColumns;
    token_ = (first + in_group % group) * C::kTokens;
    block_ = column_ / g.bn;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    thread_column_ = warp % (C::kColumns / kWarpColumns) * kWarpColumns + lane / 8 * 4;
    thread_token_ = warp / (C::kColumns / kWarpColumns) * kWarpTokens + lane % 8 * 4;
  }

  __device__ void Run() {
    const int steps = static_cast<int>(CeilDiv(a_.all_kept, kDepth));
    if (threadIdx.x < C::kStages * kDepth) List(threadIdx.x / kDepth, threadIdx.x % kDepth);
    __syncthreads();
    for (int step = 0; step < C::kStages - 1; ++step) {
      if (step < steps) Copy(step);
      block::CommitCopies();
    }
    float sum[kThreadColumns][kThreadTokens] = {};
    for (int step = 0; step < steps; ++step) {
      block::WaitForCopies<C::kStages - 2>();
      __syncthreads();  // this step's lines are there for all, and nobody reads those of the step before any more
      const int ahead = step + C::kStages - 1;
      if (ahead < steps) Copy(ahead);
      block::CommitCopies();
      if (static_cast<int>(threadIdx.x) / kWarpSize == step % (kThreads / kWarpSize) &&
          threadIdx.x % kWarpSize < kDepth && ahead + 1 < steps) {
        List(ahead + 1, threadIdx.x % kWarpSize);
      }
      Multiply(step, sum);
    }
    Store(sum);
  }

 private:
  __device__ void List(int step, int row) {
    const Geometry& g = a_.geometry;
    const int32_t position = step * kDepth + row;
    Place place{-1, -1};
    if (position < a_.all_kept) {
      const int32_t window = position / a_.kept, in_window = position % a_.kept;
      const int64_t list = (batch_ * g.windows + window) * g.out_blocks + block_;
      const int unit = UnitOfRank(__ldg(a_.mask + list), in_window / g.bk, g.window_units);
      const int32_t x = (window * g.window_units + unit) * g.bk + in_window % g.bk;
      if (x < g.in_features) place = {x, static_cast<int32_t>((window * g.out_blocks + block_) * a_.kept) + in_window};
    }
    lists_[step % C::kLists * kDepth + row] = place;
  }

  __device__ void Copy(int step) {
    const Geometry& g = a_.geometry;
    const Place* const list = lists_ + step % C::kLists * kDepth;
    float* const columns = stages_ + step % C::kStages * C::kStageFloats;
    float* const tokens = columns + kDepth * C::kColumns;
    const float* const values = a_.values + batch_ * block::ValuesPerBatch(g) + column_ % g.bn;
    const float* const x = a_.x + batch_ * g.in_features * g.tokens;
    constexpr int kColumnPieces = kDepth * C::kColumns / 4, kTokenPieces = kDepth * C::kTokens / 4;
#pragma unroll
    for (int first = 0; first < kColumnPieces; first += kThreads) {
      const int piece = first + threadIdx.x;
      if (kColumnPieces % kThreads != 0 && piece >= kColumnPieces) break;
      const int row = piece / (C::kColumns / 4), offset = piece % (C::kColumns / 4) * 4;
      const int32_t place = list[row].values;
      const bool exists = place >= 0;
      block::CopyAsync<16>(block::SharedAddress(columns + row * C::kColumns + offset),
                           values + (exists ? int64_t{place} * g.bn + offset : 0), exists);
    }
#pragma unroll
    for (int first = 0; first < kTokenPieces; first += kThreads) {
      const int piece = first + threadIdx.x;
      const int row = piece / (C::kTokens / 4), offset = piece % (C::kTokens / 4) * 4;
      const int32_t place = list[row].x;
      const bool exists = place >= 0 && token_ + offset < g.tokens;
      block::CopyAsync<16>(block::SharedAddress(tokens + row * C::kTokens + offset),
                           x + (exists ? int64_t{place} * g.tokens + token_ + offset : 0), exists);
    }
  }

  __device__ void Multiply(int step, float (&sum)[kThreadColumns][kThreadTokens]) const {
    const float* const columns = stages_ + step % C::kStages * C::kStageFloats + thread_column_;
    const float* const tokens = stages_ + step % C::kStages * C::kStageFloats + kDepth * C::kColumns + thread_token_;
#pragma unroll 4  // all of it would not fit the instruction cache
    for (int depth = 0; depth < kDepth; ++depth) {
      float left[kThreadColumns], right[kThreadTokens];
      Load<kWarpColumns>(columns + depth * C::kColumns, left);
      Load<kWarpTokens>(tokens + depth * C::kTokens, right);
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
#pragma unroll
        for (int t = 0; t < kThreadTokens; ++t) sum[c][t] = fmaf(left[c], right[t], sum[c][t]);
      }
    }
  }
  // Runs of four, evenly spread over the warp's `kAcross`.
  template <int kAcross, int kCount>
  __device__ static void Load(const float* from, float (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i / 4 * (kAcross * 4 / kCount));
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }

  __device__ void Store(const float (&sum)[kThreadColumns][kThreadTokens]) const {
    const Geometry& g = a_.geometry;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const int64_t column = int64_t{column_} + thread_column_ + c / 4 * (kWarpColumns / 2) + c % 4;
      if (column >= g.out_features) continue;
      const int64_t feature = batch_ * g.out_features + column;
      const ColumnEpilogue finish(a_.epilogue, feature);
#pragma unroll
      for (int run = 0; run < kThreadTokens / 4; ++run) {
        const int64_t token = int64_t{token_} + thread_token_ + run * (kWarpTokens * 4 / kThreadTokens);
        if (token >= g.tokens) continue;
        float v[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) v[t] = finish(sum[c][run * 4 + t]);
        *reinterpret_cast<float4*>(a_.y + feature * g.tokens + token) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }

  const Arguments& a_;
  float* const stages_;
  Place* const lists_;
  int32_t batch_, block_, column_, token_;
  int thread_column_, thread_token_;  // of this thread, inside the tile
};

template <class C>
__global__ void __launch_bounds__(kThreads, 2) ManyTokensFma(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) float storage[];
  Tile<C>(a, storage, reinterpret_cast<Place*>(storage + C::kStages * C::kStageFloats)).Run();
}

}  // namespace nmsparse::cuda::block_fma

#endif  // JAX_NMSPARSE_CUDA_BLOCK_FMA_CUH_
