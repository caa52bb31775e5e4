// One to four tokens, element-wise weights: bytes decide, so CUDA cores multiply per kept element.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  x[token, 32 w + k] * value
//
// A thread owns a column, or kLaneColumns neighbouring ones where q * size is too small for wide loads. It walks the
// set bits of the column's mask word and reads x[k] from shared memory: the 32 words of a window are the 32 banks, so
// lanes at different k meet different banks and lanes at the same k share one read. The walk starts at both ends of the
// word at once (two short dependent chains instead of one long one).
//
// A block owns plan.columns columns at their whole depth, as many as make every multiprocessor carry the same share of
// the weight: nothing is exchanged between blocks, and no second wave of few blocks follows the first. Its threads are
// `slots` rows of plan.columns / kLaneColumns: slot s takes windows s, s + slots, ... (a warp may straddle two slots:
// its reads of x then meet some banks twice).
//
// Layouts. values [windows, out_features, q]: a thread reads the q * size contiguous bytes of its column, aligned by
// construction to the largest power of two in them (out_features a multiple of kLaneColumns); the columns of a slot are
// one contiguous run. mask [windows, out_features].
// In flight: a thread asks for its next kUnroll windows before it multiplies the current ones, and before that asks
// their sectors into L2, kAhead steps early, which takes no registers: about 75 KB per multiprocessor must be on their
// way to fill the memory.
//
// Shared memory, bytes:
//   0     16                        zeros before x, so that the position -1 of a corrupt mask stays inside
//   16    4 * kTokens * rows        x of the chunk of windows at hand, as accumulators, [token][row]
//   then  4 * slots * kTokens * columns  partial sums
// Synchronisation: one barrier after x is staged (the first weights are then on their way already), two per further
// chunk, two while the sums of the slots are added in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPMV_CUH_

#include "cuda/ew_kept.cuh"

namespace nmsparse::cuda::ew {

// kQ = 0: q is known at run time only.
template <class Value_, class Acc_, int kQ_, int kTokens_, int kThreads_, int kUnroll_, int kLaneColumns_, int kAhead_>
struct SpmvConfig {
  using Value = Value_;
  using Acc = Acc_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kThreads = kThreads_, kUnroll = kUnroll_;
  static constexpr int kLaneColumns = kLaneColumns_;
  static constexpr int kAhead = kAhead_;  // steps by which weights are asked into L2 before they are loaded
  static constexpr int kLead = 16;
  static constexpr int kFolds = 8;  // partial sums that a result is added from at the end
  static constexpr int kSumsBytes = 4 * kThreads * kTokens * kLaneColumns;
  static_assert(sizeof(Acc) == 4, "x is staged as one bank word per row");
  static_assert(kQ > 0 || kLaneColumns == 1, "a q known at run time is walked column by column");

  static __host__ __device__ int64_t SharedBytes(int64_t chunk_windows) {
    return kLead + int64_t{4} * kTokens * kWindow * chunk_windows + kSumsBytes;
  }
};

struct SpmvPlan {
  int32_t columns;        // of a block; a multiple of kLaneColumns
  int32_t chunk_windows;  // of which x is staged at a time, a multiple of slots * kUnroll
};

// Rows [0, rows) of one token to shared memory; rows from `present` on are zeros.
template <class Acc, class X>
__device__ __forceinline__ void StageRow(const X* row, int rows, int present, Acc* staged) {
  constexpr int kVector = 16 / sizeof(X);
  if (present == rows && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    for (int i = threadIdx.x * kVector; i < rows; i += blockDim.x * kVector) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(row + i));
      X part[kVector];
      memcpy(part, &raw, 16);
#pragma unroll
      for (int j = 0; j < kVector; j += 4) {
        Acc wide[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) wide[k] = ToAccumulator<Acc>(part[j + k]);
        uint4 quad;
        memcpy(&quad, wide, 16);
        *reinterpret_cast<uint4*>(staged + i + j) = quad;
      }
    }
  } else {
    for (int i = threadIdx.x; i < rows; i += blockDim.x) staged[i] = i < present ? ToAccumulator<Acc>(row[i]) : Acc(0);
  }
}

// The rare dtypes of x, out of the way of the instruction cache.
template <class Acc>
__device__ __noinline__ void StageRowOfAnyType(const void* x, DType dtype, int64_t first, int rows, int present,
                                               Acc* staged) {
  WithInputType<Acc>(
      dtype, [&](auto zero) { StageRow(static_cast<const decltype(zero)*>(x) + first, rows, present, staged); });
}

template <class C>
__device__ __forceinline__ void StageChunk(const Problem& problem, int64_t batch, int64_t window, int windows,
                                           int64_t stride, typename C::Acc* x) {
  using Acc = typename C::Acc;
  const Geometry& geometry = problem.geometry;
  const int rows = windows * kWindow;
#pragma unroll 1
  for (int token = 0; token < C::kTokens; ++token) {
    const int64_t row = window * kWindow, left = token < geometry.tokens ? geometry.in_features - row : 0;
    const int present = static_cast<int>(max(int64_t{0}, min(int64_t{rows}, left)));
    const int64_t first =
        (batch * geometry.tokens + min(int64_t{token}, geometry.tokens - 1)) * geometry.in_features + row;
    Acc* staged = x + token * stride;
    if (std::is_same_v<Acc, float> && problem.x.dtype == DType::kBF16) {
      StageRow(static_cast<const __nv_bfloat16*>(problem.x.data) + first, rows, present, staged);
    } else {
      StageRowOfAnyType<Acc>(problem.x.data, problem.x.dtype, first, rows, present, staged);
    }
  }
}

template <class C>
__device__ __forceinline__ void MultiplyKept(typename C::Acc weight, const typename C::Acc* x, int64_t stride, int row,
                                             typename C::Acc (&sum)[C::kTokens]) {
#pragma unroll
  for (int token = 0; token < C::kTokens; ++token) sum[token] += weight * x[token * stride + row];
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    SpmvKernel(const __grid_constant__ Problem problem, const SpmvPlan plan) {
  using Value = typename C::Value;
  using Acc = typename C::Acc;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int64_t out = geometry.out_features, batch = blockIdx.z;
  const int64_t first_column = int64_t{blockIdx.x} * plan.columns;
  const int last = static_cast<int>(geometry.windows);
  const int q = C::kQ > 0 ? C::kQ : geometry.q;
  const int lanes = plan.columns / C::kLaneColumns, slots = C::kThreads / lanes;
  const int slot = threadIdx.x / lanes, lane = threadIdx.x - slot * lanes;

  // Columns beyond the last are read as the last ones and not stored; threads beyond the last slot read nothing.
  const int64_t column = min(first_column + lane * C::kLaneColumns, out - C::kLaneColumns);
  const int64_t origin = (batch * geometry.windows + slot) * out + column;
  const uint32_t* mask = problem.mask + origin;
  const char* values = static_cast<const char*>(problem.values.data) + origin * q * sizeof(Value);
  const int64_t mask_step = slots * out, values_step = mask_step * q * static_cast<int64_t>(sizeof(Value));

  using Columns = KeptColumn<Value, C::kQ == 0 ? 1 : C::kQ * C::kLaneColumns>;
  using Bits = KeptColumn<float, C::kLaneColumns>;  // words
  Columns next[C::kUnroll];
  Bits next_bits[C::kUnroll];
  const char* next_values[C::kUnroll];  // kQ = 0: read when multiplied
  auto load = [&](int window) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) {
      if (window + u * slots < last) {
        next_bits[u].template Load<true>([&](int offset) { return reinterpret_cast<const char*>(mask) + offset; });
        if constexpr (C::kQ > 0) {
          next[u].template Load<true>([&](int offset) { return values + offset; });
        } else {
          next_values[u] = values;
        }
      }
      mask += mask_step;
      values += values_step;
    }
  };
  const char* ahead_values = values;
  const uint32_t* ahead_mask = mask;
  auto ask = [&](int window) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) {
      if (window + u * slots < last) {
        constexpr int kSector = 32;
#pragma unroll
        for (int i = 0; i < Columns::kBytes; i += kSector) PrefetchL2(ahead_values + i);
        PrefetchL2(ahead_mask);
      }
      ahead_mask += mask_step;
      ahead_values += values_step;
    }
  };

  int window = slot < slots ? slot : last;
  load(window);
  if constexpr (C::kAhead > 0) {
    ahead_values = values, ahead_mask = mask;
#pragma unroll 1
    for (int i = 1; i < C::kAhead; ++i) ask(window + i * C::kUnroll * slots);
  }

  Acc* x = reinterpret_cast<Acc*>(shared + C::kLead);
  const int64_t stride = int64_t{plan.chunk_windows} * kWindow;
  Acc* sums = x + C::kTokens * stride;
  if (threadIdx.x < C::kLead / 4) reinterpret_cast<Acc*>(shared)[threadIdx.x] = 0;

  Acc high[C::kLaneColumns][C::kTokens] = {}, low[C::kLaneColumns][C::kTokens] = {};
  for (int chunk = 0; chunk < last; chunk += plan.chunk_windows) {
    const int chunk_end = min(chunk + plan.chunk_windows, last);
    if (chunk != 0) __syncthreads();
    StageChunk<C>(problem, batch, chunk, chunk_end - chunk, stride, x);
    __syncthreads();

    for (; window < chunk_end; window += slots * C::kUnroll) {
      Columns kept[C::kUnroll];
      Bits bits[C::kUnroll];
      const char* kept_values[C::kUnroll];
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) kept[u] = next[u], bits[u] = next_bits[u], kept_values[u] = next_values[u];
      load(window + C::kUnroll * slots);
      if constexpr (C::kAhead > 0) ask(window + C::kAhead * C::kUnroll * slots);
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        if (window + u * slots >= last) break;
        const Acc* rows = x + (window + u * slots - chunk) * kWindow;
        if constexpr (C::kQ > 0) {
          kept[u].Prepare();
#pragma unroll
          for (int c = 0; c < C::kLaneColumns; ++c) {
            uint32_t set = bits[u].words[c], reversed = __brev(set);
#pragma unroll
            for (int j = 0; j < (C::kQ + 1) / 2; ++j) {
              const int top = HighestBit(set);
              set ^= Bit(top);
              MultiplyKept<C>(kept[u].template At<Acc>((c + 1) * C::kQ - 1 - j), rows, stride, top, high[c]);
              if (j < C::kQ / 2) {
                const int bottom = LeadingZeros(reversed);
                reversed ^= BitFromTop(bottom);
                MultiplyKept<C>(kept[u].template At<Acc>(c * C::kQ + j), rows, stride, bottom, low[c]);
              }
            }
          }
        } else {
          const Value* column_values = reinterpret_cast<const Value*>(kept_values[u]);
          uint32_t set = bits[u].words[0];
#pragma unroll 4
          for (int j = q - 1; j >= 0; --j) {
            const int top = HighestBit(set);
            set ^= Bit(top);
            MultiplyKept<C>(ToAccumulator<Acc>(column_values[j]), rows, stride, top, high[0]);
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
      for (int c = 0; c < C::kLaneColumns; ++c) {
        sums[slot * results + token * plan.columns + lane * C::kLaneColumns + c] = high[c][token] + low[c][token];
      }
    }
  }
  __syncthreads();
  if (slots > C::kFolds) {
    for (int i = threadIdx.x; i < C::kFolds * results; i += C::kThreads) {
      Acc total = sums[i];
      for (int at = i + C::kFolds * results; at < slots * results; at += C::kFolds * results) total += sums[at];
      sums[i] = total;
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < results; i += C::kThreads) {
    Acc total = sums[i];
    for (int fold = 1; fold < min(slots, C::kFolds); ++fold) total += sums[fold * results + i];
    const int token = i / plan.columns;
    const int64_t feature = first_column + i - token * plan.columns;
    if (token < geometry.tokens && feature < out) {
      StoreOutput(problem, (batch * geometry.tokens + token) * out + feature, batch * out + feature, total);
    }
  }
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
