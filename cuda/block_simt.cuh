// y = act((x W) * scales + bias) for few tokens on CUDA cores, in float32: every block shape and weight dtype.
//
//   y[t, c] = sum over kept rows k of c's column block: x[t, k] * W[k, c]
//
// A lane owns kColumns neighbouring columns of one column block and walks down their kept rows; a load is kRows rows of
// them, contiguous in memory (kRows > 1 only where the block is kColumns wide), and travels by cp.async through a ring
// in shared memory that is private to the lane: kStages - 1 loads in flight without registers (77 % of the byte floor
// for float32 where loads into registers reached 45 %). The row of x comes from the mask, lowest bit first; x
// waits in shared memory as float [row][kTokens]. Where lanes share a column block their reads of x are one broadcast;
// where they do not, a window of x is 32 banks (at one token), so different bits never conflict.
//
// A warp owns 32 * kColumns columns; the kWarps warps of a block split a chunk of windows, a cluster of `splits` blocks
// splits the windows of W; partial sums are added in a fixed order (CombineAndStore).
// Grid: (column tiles * splits, token tiles, batch), clusters of `splits` along x.
//
// Shared memory, bytes:
//   0            ring  kWarps * kStages * 32 * kLoadBytes   (none where a load is under 4 bytes)
//   kRingBytes   x     4 * kTokens * chunk_windows * rows per window
//   reused at the end for sums [kWarps][tokens][32 * kColumns + 4] float
// Synchronisation: two barriers per chunk.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_SIMT_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_SIMT_CUH_

#include "cuda/block_tiles.cuh"

namespace nmsparse::cuda::block {

// kUnitRows: units of one row and masks of one word, the common case; otherwise any.
template <class Value_, int kColumns_, int kRows_, int kTokens_, bool kUnitRows_>
struct SimtConfig {
  using Value = Value_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRows = kRows_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kUnitRows = kUnitRows_;
  static constexpr int kLoadBytes = kColumns * kRows * static_cast<int>(sizeof(Value));
  static constexpr bool kAsync = kLoadBytes >= 4;
  static constexpr int kStages = kAsync ? 16 : 0;
  static constexpr int kBatch = 8;  // loads in flight where there is no ring
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kTileColumns = kWarpSize * kColumns;
  static constexpr int kStageBytes = kWarpSize * kLoadBytes;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSumsBytes = kWarps * kTokens * (kTileColumns + 4) * 4;
  static_assert(kLoadBytes <= 16, "a load is at most one vector of 16 bytes");
  static_assert(kTokens == 1 || kTokens == 2 || kTokens % 4 == 0, "x is read in vectors of tokens");
};

struct SimtPlan {
  int32_t splits;         // blocks of a cluster
  int32_t chunk_windows;  // windows of x in shared memory
};

// The kept rows of one column block from one window on, in order.
template <bool kUnitRows>
struct RowCursor {
  const uint32_t* words;              // of the current window
  int64_t pitch;                      // to the next window
  uint32_t bits, ahead;               // ahead: the next window's word (kUnitRows)
  int word, unit_row, left, windows;  // row inside the unit; kept rows left in this window; windows left
  int row, window_row;

  __device__ __forceinline__ uint32_t Word(const Geometry& g, int i) const {
    const int units = g.window_units - i * kMaskBits;
    return __ldg(words + i) & (units < kMaskBits ? (1u << units) - 1 : 0xffffffffu);
  }
  __device__ __forceinline__ void Start(const Geometry& g, const uint32_t* first, int64_t to_next, int count, int at) {
    words = first, pitch = to_next, windows = count, window_row = at;
    bits = Word(g, 0), word = 0, unit_row = 0, left = g.q * g.bk;
    if (kUnitRows) Prefetch(g);
  }
  __device__ __forceinline__ void Prefetch(const Geometry& g) {
    if (--windows > 0) words += pitch;
    if constexpr (kUnitRows) ahead = Word(g, 0);
  }
  // The row of the next kept value. Where a corrupt mask has no bit left it stays at the window's first row.
  __device__ __forceinline__ int Next(const Geometry& g) {
    if (left == 0) {
      window_row += g.window_units * g.bk;
      bits = kUnitRows ? ahead : Word(g, 0);
      word = 0, unit_row = 0, left = g.q * g.bk;
      if (kUnitRows) Prefetch(g);
    }
    --left;
    if constexpr (kUnitRows) {
      const int unit = bits == 0 ? 0 : __ffs(bits) - 1;
      bits &= bits - 1;
      return window_row + unit;
    } else {
      if (unit_row == 0) {
        while (bits == 0 && word + 1 < g.mask_words) bits = Word(g, ++word);
        row = window_row + (bits == 0 ? 0 : (word * kMaskBits + __ffs(bits) - 1) * g.bk);
        bits &= bits - 1;
      }
      const int result = row + unit_row;
      if (++unit_row == g.bk) unit_row = 0;
      if (left == 0 && --windows > 0) words += pitch;
      return result;
    }
  }
};

template <class C>
struct SimtLoad {
  typename C::Value v[C::kRows][C::kColumns];

  // From memory; from the lane's slot of the ring.
  __device__ __forceinline__ void Read(const typename C::Value* source) {
    if constexpr (C::kAsync) {
      uint32_t raw[C::kLoadBytes / 4];
      LoadWords(raw, source);
      memcpy(v, raw, C::kLoadBytes);
    } else {
#pragma unroll
      for (int i = 0; i < C::kRows * C::kColumns; ++i) v[i / C::kColumns][i % C::kColumns] = source[i];
    }
  }
};

// kTokens neighbouring floats of shared memory.
template <int kTokens>
__device__ __forceinline__ void LoadTokens(float (&v)[kTokens], const float* from) {
  if constexpr (kTokens % 4 == 0) {
#pragma unroll
    for (int t = 0; t < kTokens; t += 4) {
      *reinterpret_cast<float4*>(v + t) = *reinterpret_cast<const float4*>(from + t);
    }
  } else if constexpr (kTokens == 2) {
    *reinterpret_cast<float2*>(v) = *reinterpret_cast<const float2*>(from);
  } else {
    v[0] = from[0];
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2) BlockSimtKernel(Problem problem, SimtPlan plan) {
  using Value = typename C::Value;
  extern __shared__ __align__(128) unsigned char shared[];
  float* const x_tile = reinterpret_cast<float*>(shared + C::kRingBytes);
  const Geometry& geometry = problem.geometry;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int kept = geometry.q * geometry.bk, rows_per_window = geometry.window_units * geometry.bk;
  const int split = blockIdx.x % plan.splits;
  const int64_t tile_column = static_cast<int64_t>(blockIdx.x / plan.splits) * C::kTileColumns;
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * C::kTokens, batch = blockIdx.z;
  const int tokens = static_cast<int>(min(int64_t{C::kTokens}, geometry.tokens - token0));
  const int64_t window_begin = geometry.windows * split / plan.splits;
  const int64_t window_end = geometry.windows * (split + 1) / plan.splits;

  const int64_t column = tile_column + lane * C::kColumns;
  const bool active = column < geometry.out_blocks * geometry.bn;
  const int64_t block = active ? column / geometry.bn : 0;
  const Value* const values = static_cast<const Value*>(problem.values.data) + batch * ValuesPerBatch(geometry) +
                              block * kept * geometry.bn + (active ? column - block * geometry.bn : 0);
  const int64_t values_pitch = geometry.out_blocks * kept * geometry.bn;
  const uint32_t* const mask = problem.mask + batch * MaskPerBatch(geometry) + block * geometry.mask_words;
  const int64_t mask_pitch = geometry.out_blocks * geometry.mask_words;
  const int64_t x_first = (batch * geometry.tokens + token0) * geometry.in_features;

  float sums[C::kTokens][C::kColumns] = {};
  for (int64_t window = window_begin; window < window_end; window += plan.chunk_windows) {
    const int count = static_cast<int>(min(int64_t{plan.chunk_windows}, window_end - window));
    const int64_t k0 = window * rows_per_window;
    __syncthreads();
    WithInputType(problem.x.dtype, [&](auto zero) {
      const auto* x = static_cast<const decltype(zero)*>(problem.x.data) + x_first + k0;
#pragma unroll
      for (int t = 0; t < C::kTokens; ++t) {
        for (int r = threadIdx.x; r < count * rows_per_window; r += C::kThreads) {
          x_tile[r * C::kTokens + t] =
              t < tokens && k0 + r < geometry.in_features ? ToFloat(x[t * geometry.in_features + r]) : 0.0f;
        }
      }
    });
    __syncthreads();

    const int first = count * warp / C::kWarps, last = count * (warp + 1) / C::kWarps;
    const int loads = active ? (last - first) * kept / C::kRows : 0;  // whole loads: kept is a multiple of kRows
    if (loads == 0) continue;
    RowCursor<C::kUnitRows> cursor;
    cursor.Start(geometry, mask + (window + first) * mask_pitch, mask_pitch, last - first, first * rows_per_window);
    const Value* source = values + (window + first) * values_pitch;
    int source_left = kept, to_read = loads;
    auto advance = [&] {
      source += C::kRows * geometry.bn;
      source_left -= C::kRows;
      if (source_left == 0) source += values_pitch - int64_t{kept} * geometry.bn, source_left = kept;
      --to_read;
    };
    auto multiply = [&](const SimtLoad<C>& now) {
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
        float x[C::kTokens];
        LoadTokens(x, x_tile + cursor.Next(geometry) * C::kTokens);
#pragma unroll
        for (int c = 0; c < C::kColumns; ++c) {
          const float value = ToFloat(now.v[r][c]);
#pragma unroll
          for (int t = 0; t < C::kTokens; ++t) sums[t][c] = fmaf(x[t], value, sums[t][c]);
        }
      }
    };
    if constexpr (C::kAsync) {
      unsigned char* const ring = shared + warp * (C::kStages * C::kStageBytes) + lane * C::kLoadBytes;
      const unsigned char* const ring_end = ring + C::kStages * C::kStageBytes;
      unsigned char* fill = ring;
      auto issue = [&] {
        if (to_read > 0) {
          CopyAsync<C::kLoadBytes>(SharedAddress(fill), source, true);
          advance();
        }
        CommitCopies();
        fill += C::kStageBytes;
        if (fill == ring_end) fill = ring;
      };
#pragma unroll 1
      for (int i = 0; i < C::kStages - 1; ++i) issue();
      const unsigned char* slot = ring;
#pragma unroll 2
      for (int i = 0; i < loads; ++i) {
        WaitForCopies<C::kStages - 2>();
        SimtLoad<C> now;
        now.Read(reinterpret_cast<const Value*>(slot));
        slot += C::kStageBytes;
        if (slot == ring_end) slot = ring;
        issue();
        multiply(now);
      }
      WaitForCopies<0>();
    } else {
      for (int done = 0; done < loads; done += C::kBatch) {
        SimtLoad<C> batch_loads[C::kBatch];
#pragma unroll
        for (int i = 0; i < C::kBatch; ++i) {
          if (to_read > 0) {
            batch_loads[i].Read(source);
            advance();
          }
        }
#pragma unroll
        for (int i = 0; i < C::kBatch; ++i) {
          if (done + i < loads) multiply(batch_loads[i]);
        }
      }
    }
  }

  __syncthreads();
  float* const partial = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int t = 0; t < C::kTokens; ++t) {
    if (t < tokens) {
      float* out = partial + (warp * tokens + t) * (C::kTileColumns + 4) + lane * C::kColumns;
#pragma unroll
      for (int c = 0; c < C::kColumns; ++c) out[c] = sums[t][c];
    }
  }
  CombineAndStore<C::kThreads>(problem, partial, token0, tokens, tile_column, C::kTileColumns, C::kWarps, split,
                               plan.splits);
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_SIMT_CUH_
