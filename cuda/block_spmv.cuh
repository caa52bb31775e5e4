// One to four tokens, vector-wise or block-wise weights: bytes decide, so CUDA cores multiply per kept element.
//
//   y[t, c] = sum over kept rows k of c's column block: x[t, k] * W[k, c]
//
// A thread owns kLaneColumns neighbouring columns of one block: the 16 bytes of a kept row that it reads at once. Its
// items are kRows consecutive kept units of a window: it walks the set bits of the window's mask word and reads x,
// which the lanes of a block share, from shared memory. The next item is asked for before the current one is
// multiplied.
//
// A block of threads owns plan.columns columns at their whole depth, as many as make every multiprocessor carry the
// same share of the weight: nothing is exchanged between blocks. Its threads are `slots` rows of plan.columns /
// kLaneColumns; slot s takes items s, s + slots, ...
//
// Shared memory, bytes:
//   0     4 * kTokens * rows                  x of the chunk of windows at hand, as accumulators, [token][row]
//   then  4 * slots * kTokens * columns       partial sums
// Synchronisation: one barrier after x is staged (the first weights are then on their way already), two per further
// chunk, two while the sums of the slots are added in ascending order.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_SPMV_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_SPMV_CUH_

#include "cuda/ew_kept.cuh"
#include "cuda/stage_rows.cuh"

namespace nmsparse::cuda::block {

template <class Value_, int kTokens_, int kRows_, int kThreads_ = 512>
struct SpmvConfig {
  using Value = Value_;
  using Acc = float;
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = kRows_;  // kept units of an item
  static constexpr int kThreads = kThreads_;
  static constexpr int kLaneColumns = 16 / sizeof(Value);
  static constexpr int kFolds = 8;  // partial sums that a result is added from at the end
  static constexpr int64_t kSumsBytes = int64_t{4} * kThreads * kTokens * kLaneColumns;

  static int64_t SharedBytes(int64_t chunk_rows) { return 4 * kTokens * chunk_rows + kSumsBytes; }
};

struct SpmvPlan {
  int32_t columns;        // of a block; a multiple of kLaneColumns
  int32_t items;          // of a window
  int32_t chunk_windows;  // of which x is staged at a time
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    BlockSpmvKernel(const __grid_constant__ Problem problem, const SpmvPlan plan) {
  using Value = typename C::Value;
  using Kept = ew::KeptColumn<Value, C::kLaneColumns>;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lanes = plan.columns / C::kLaneColumns, slots = C::kThreads / lanes;
  const int slot = threadIdx.x / lanes, lane = threadIdx.x - slot * lanes;
  const int64_t batch = blockIdx.z, first_column = int64_t{blockIdx.x} * plan.columns;
  const int windows = static_cast<int>(geometry.windows), q = geometry.q, bk = geometry.bk;
  const int items = slot < slots ? windows * plan.items : 0;

  // Columns beyond the last block are read as its last ones and not stored.
  const int64_t column =
      min(first_column + lane * C::kLaneColumns, geometry.out_blocks * geometry.bn - C::kLaneColumns);
  const int64_t block = column / geometry.bn;
  const uint32_t* const mask = problem.mask + batch * geometry.windows * geometry.out_blocks + block;
  const int64_t unit = int64_t{bk} * geometry.bn, window_pitch = geometry.out_blocks * q * unit;
  const Value* const values = static_cast<const Value*>(problem.values.data) + batch * geometry.windows * window_pitch +
                              block * q * unit + (column - block * geometry.bn);

  float* const x = reinterpret_cast<float*>(shared);
  const int64_t stride = int64_t{plan.chunk_windows} * kMaskBits * bk;
  float* const sums = x + C::kTokens * stride;
  float total[C::kTokens][C::kLaneColumns] = {};
  auto multiply = [&](Kept& kept, const float* row) {
    kept.Prepare();
#pragma unroll
    for (int token = 0; token < C::kTokens; ++token) {
      const float factor = row[token * stride];
#pragma unroll
      for (int c = 0; c < C::kLaneColumns; ++c) total[token][c] += kept.template At<float>(c) * factor;
    }
  };
  auto read = [](Kept& kept, const Value* from) {
    kept.template Load<true>([&](int offset) { return reinterpret_cast<const char*>(from) + offset; });
  };

  Kept next[C::kRows];
  uint32_t next_bits = 0;
  int next_window = 0, next_part = 0;
  const Value* next_values = values;
  auto load = [&](int item) {
    if (item >= items) return;
    next_window = item / plan.items, next_part = item - next_window * plan.items;
    next_bits = __ldg(mask + next_window * geometry.out_blocks);
    next_values = values + next_window * window_pitch + next_part * C::kRows * unit;
#pragma unroll
    for (int j = 0; j < C::kRows; ++j) {
      if (next_part * C::kRows + j < q) read(next[j], next_values + j * unit);
    }
  };

  int item = slot;
  load(item);
  for (int chunk = 0; chunk < windows; chunk += plan.chunk_windows) {
    const int chunk_end = min(chunk + plan.chunk_windows, windows);
    const int chunk_rows = (chunk_end - chunk) * kMaskBits * bk;
    if (chunk != 0) __syncthreads();
    StageRows<C>(problem, batch, int64_t{chunk} * kMaskBits * bk, chunk_rows, stride, x);
    __syncthreads();
    const int end = min(items, chunk_end * plan.items);
    for (; item < end; item += slots) {
      Kept kept[C::kRows];
#pragma unroll
      for (int j = 0; j < C::kRows; ++j) kept[j] = next[j];
      uint32_t bits = next_bits;
      const float* const rows = x + (next_window - chunk) * kMaskBits * bk;
      const Value* const further = next_values;
      const int part = next_part, left = q - part * C::kRows;
      load(item + slots);
      for (int skip = part * C::kRows; skip > 0; --skip) bits &= bits - 1;
#pragma unroll
      for (int j = 0; j < C::kRows; ++j) {
        if (j < left && bits != 0) {  // a corrupt mask may run out of bits
          const float* const row = rows + (__ffs(bits) - 1) * bk;
          bits &= bits - 1;
          multiply(kept[j], row);
#pragma unroll 1
          for (int i = 1; i < bk; ++i) {
            Kept more;
            read(more, further + j * unit + int64_t{i} * geometry.bn);
            multiply(more, row + i);
          }
        }
      }
    }
  }

  // [slot][token][column of the block]: first the slots kFolds apart, then the kFolds sums of each result.
  const int results = C::kTokens * plan.columns;
  if (slot < slots) {
#pragma unroll
    for (int token = 0; token < C::kTokens; ++token) {
#pragma unroll
      for (int c = 0; c < C::kLaneColumns; c += 4) {
        *reinterpret_cast<float4*>(sums + slot * results + token * plan.columns + lane * C::kLaneColumns + c) =
            make_float4(total[token][c], total[token][c + 1], total[token][c + 2], total[token][c + 3]);
      }
    }
  }
  FoldSlots<C>(sums, slots, results);
  for (int i = threadIdx.x; i < results; i += C::kThreads) {
    float sum = sums[i];
    for (int fold = 1; fold < min(slots, C::kFolds); ++fold) sum += sums[fold * results + i];
    const int token = i / plan.columns;
    const int64_t feature = first_column + i - token * plan.columns;
    if (token < geometry.tokens && feature < geometry.out_features) {
      ew::StoreOutput(problem, (batch * geometry.tokens + token) * geometry.out_features + feature,
                      batch * geometry.out_features + feature, sum);
    }
  }
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_SPMV_CUH_
