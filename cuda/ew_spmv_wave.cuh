// One to sixteen tokens, element-wise weights, in one wave of large blocks: ew_spmv.cuh's walk over the kept positions
// with another division of the work, for weights so large that its even share decides, and for several tokens.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  x[token, 32 w + k] * value
//
// A block owns plan.columns columns at their whole depth, as many as make every multiprocessor carry the same share of
// the weight: nothing is exchanged between blocks, and no second wave of few blocks follows the first. A thread owns a
// column, or kLaneColumns neighbouring ones where q * size is too small for wide loads. The threads of a block are
// `slots` rows of plan.columns / kLaneColumns: slot s takes windows s, s + slots, ... (a warp may straddle two slots:
// its reads of x then meet some banks twice). A thread asks for its next kUnroll windows before it multiplies the
// current ones.
//
// Layouts. values [windows, out_features, q]: a thread reads the q * size contiguous bytes of its column, aligned by
// construction to the largest power of two in them (out_features a multiple of kLaneColumns); the columns of a slot are
// one contiguous run. mask [windows, out_features].
//
// Several tokens of a row of x lie side by side, so that a lane reads them in one access, and in x's own dtype where
// they are more than two: the bytes that leave shared memory are what limits. Lanes of a quarter warp that are at
// different rows meet different banks as a rule, since all walk their words in the same direction.
//
// Shared memory, bytes:
//   0       max(16, row)                 zeros before x, so that the position -1 of a corrupt mask stays inside
//   then    row * rows                   x of the chunk of windows at hand, [row][token] of Row
//   then    4 * slots * columns * tokens partial sums
// Synchronisation: one barrier after x is staged (the first weights are then on their way already), two per further
// chunk, two while the sums of the slots are added in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPMV_WAVE_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPMV_WAVE_CUH_

#include "cuda/ew_spmv.cuh"

namespace nmsparse::cuda::ew {

// Row: the dtype that x is staged in.
template <class Value_, class Row_, int kTokens_, int kQ_, int kThreads_, int kUnroll_, int kLaneColumns_, int kBlocks_>
struct WaveConfig {
  using Value = Value_;
  using Acc = float;
  using Row = Row_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kThreads = kThreads_, kUnroll = kUnroll_;
  static constexpr int kLaneColumns = kLaneColumns_;
  static constexpr int kBlocks = kBlocks_;  // of a multiprocessor
  static constexpr int kRowBytes = kTokens * static_cast<int>(sizeof(Row));
  static constexpr int kLead = kRowBytes > 16 ? kRowBytes : 16;
  static constexpr int kFolds = 8;  // partial sums that a result is added from at the end
  static constexpr int64_t kSumsBytes = int64_t{4} * kThreads * kLaneColumns * kTokens;

  static int64_t SharedBytes(int64_t chunk_windows) {
    return kLead + int64_t{kRowBytes} * kWindow * chunk_windows + kSumsBytes;
  }
};

// x in shared memory, [row][token].
template <class Row, int kTokens>
struct RowsOfTokens {
  const char* x;

  __device__ __forceinline__ void AddRow(float weight, int row, float (&sum)[kTokens]) const {
    KeptColumn<Row, kTokens> tokens;
    const char* from = x + row * static_cast<int>(kTokens * sizeof(Row));
    tokens.template Load<false>([&](int offset) { return from + offset; });
#pragma unroll
    for (int token = 0; token < kTokens; ++token) sum[token] += weight * tokens.template At<float>(token);
  }
};

struct WavePlan {
  int32_t columns;        // of a block; a multiple of kLaneColumns
  int32_t chunk_windows;  // of which x is staged at a time, a multiple of slots * kUnroll
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    WaveKernel(const __grid_constant__ Problem problem, const WavePlan plan) {
  using Value = typename C::Value;
  using Acc = typename C::Acc;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int64_t out = geometry.out_features, batch = blockIdx.z;
  const int64_t first_column = int64_t{blockIdx.x} * plan.columns;
  const int last = static_cast<int>(geometry.windows);
  const int lanes = plan.columns / C::kLaneColumns, slots = C::kThreads / lanes;
  const int slot = threadIdx.x / lanes, lane = threadIdx.x - slot * lanes;

  // Columns beyond the last are read as the last ones and not stored; threads beyond the last slot read nothing.
  const int64_t column = min(first_column + lane * C::kLaneColumns, out - C::kLaneColumns);
  const int64_t origin = (batch * geometry.windows + slot) * out + column;
  const uint32_t* mask = problem.mask + origin;
  const char* values = static_cast<const char*>(problem.values.data) + origin * C::kQ * sizeof(Value);
  const int64_t mask_step = slots * out, values_step = mask_step * C::kQ * static_cast<int64_t>(sizeof(Value));

  using Columns = KeptColumn<Value, C::kQ * C::kLaneColumns>;
  using Bits = KeptColumn<float, C::kLaneColumns>;  // words
  Columns next[C::kUnroll];
  Bits next_bits[C::kUnroll];
  auto load = [&](int window) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) {
      if (window + u * slots < last) {
        next_bits[u].template Load<true>([&](int offset) { return reinterpret_cast<const char*>(mask) + offset; });
        next[u].template Load<true>([&](int offset) { return values + offset; });
      }
      mask += mask_step;
      values += values_step;
    }
  };
  int window = slot < slots ? slot : last;
  load(window);

  char* x = shared + C::kLead;
  Acc* sums = reinterpret_cast<Acc*>(x + int64_t{plan.chunk_windows} * kWindow * C::kRowBytes);
  if (threadIdx.x < C::kLead / 4) reinterpret_cast<Acc*>(shared)[threadIdx.x] = 0;

  // Two chains of additions for one token; several tokens are as many chains.
  Acc high[C::kLaneColumns][C::kTokens] = {}, low[C::kLaneColumns][C::kTokens] = {};
  for (int chunk = 0; chunk < last; chunk += plan.chunk_windows) {
    const int chunk_end = min(chunk + plan.chunk_windows, last);
    if (chunk != 0) __syncthreads();
    StageTokens<C>(problem, batch, int64_t{chunk} * kWindow, (chunk_end - chunk) * kWindow, x);
    __syncthreads();

    for (; window < chunk_end; window += slots * C::kUnroll) {
      Columns kept[C::kUnroll];
      Bits bits[C::kUnroll];
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) kept[u] = next[u], bits[u] = next_bits[u];
      load(window + C::kUnroll * slots);
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        if (window + u * slots >= last) break;
        const RowsOfTokens<typename C::Row, C::kTokens> rows{x + (window + u * slots - chunk) * kWindow * C::kRowBytes};
        MultiplyColumns<C>(kept[u], bits[u], rows, high, C::kTokens == 1 ? low : high);
      }
    }
  }

  // [slot][column of the block][token]: first the slots kFolds apart, then the kFolds sums of each result.
  const int results = plan.columns * C::kTokens;
  if (slot < slots) {
#pragma unroll
    for (int c = 0; c < C::kLaneColumns; ++c) {
#pragma unroll
      for (int token = 0; token < C::kTokens; ++token) {
        sums[slot * results + (lane * C::kLaneColumns + c) * C::kTokens + token] = high[c][token] + low[c][token];
      }
    }
  }
  FoldSlots<C>(sums, slots, results);
  for (int i = threadIdx.x; i < results; i += C::kThreads) {
    const int token = i / plan.columns, result = (i - token * plan.columns) * C::kTokens + token;
    Acc total = sums[result];
    for (int fold = 1; fold < min(slots, C::kFolds); ++fold) total += sums[fold * results + result];
    const int64_t feature = first_column + i - token * plan.columns;
    if (feature < out && token < geometry.tokens) {
      StoreOutput(problem, (batch * geometry.tokens + token) * out + feature, batch * out + feature, total);
    }
  }
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_SPMV_WAVE_CUH_
