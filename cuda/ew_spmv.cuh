// One to four tokens, element-wise weights: bytes decide, so CUDA cores multiply per kept element.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  x[token, 32 w + k] * value
//
// A lane owns a column. It walks the set bits of the column's mask word and reads x[k] from shared memory: the 32 words
// of a window are the 32 banks, so lanes at different k meet different banks and lanes at the same k share one read.
// The walk starts at both ends of the word at once (two short dependent chains instead of one long one).
//
// Layouts. values [windows, out_features, q]: a lane reads the q * size contiguous bytes of its column, aligned by
// construction to the largest power of two in them; the 32 columns of a warp are one contiguous run. mask [windows,
// out_features]. A block owns 32 columns and one of `gridDim.y` equal shares of the windows; its warps take the windows
// in turn, kUnroll at a time, and ask for the next ones before they multiply: many warps with few bytes each in flight.
//
// Shared memory, bytes:
//   0     16                        zeros before x, so that the position -1 of a corrupt mask stays inside
//   16    4 * kTokens * rows        x of the chunk of windows at hand, as accumulators, [token][row]
//   then  4 * kWarps * kTokens * 32 partial sums
// Synchronisation: one barrier after x is staged (the first weights are then on their way already), two per further
// chunk, one before the sums are added, over warps and then over the blocks of the cluster, in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPMV_CUH_

#include "cuda/ew_kept.cuh"

namespace nmsparse::cuda::ew {

// kQ = 0: q is known at run time only.
template <class Value_, class Acc_, int kQ_, int kTokens_, int kWarps_, int kUnroll_>
struct SpmvConfig {
  using Value = Value_;
  using Acc = Acc_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kUnroll = kUnroll_;
  static constexpr int kColumns = kWarpSize;
  static constexpr int kLead = 16;
  static constexpr int kSumsBytes = 4 * kWarps * kTokens * kColumns;
  static_assert(sizeof(Acc) == 4, "x is staged as one bank word per row");
  static_assert(kTokens <= kWarps, "a warp adds up the sums of one token");

  static __host__ __device__ int64_t SharedBytes(int64_t chunk_windows) {
    return kLead + int64_t{4} * kTokens * kWindow * chunk_windows + kSumsBytes;
  }
};

struct SpmvPlan {
  int32_t split_windows;  // windows per block
  int32_t chunk_windows;  // of which x is staged at a time
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
  WithInputType<Acc>(dtype, [&](auto zero) {
    StageRow(static_cast<const decltype(zero)*>(x) + first, rows, present, staged);
  });
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
    const int64_t first = (batch * geometry.tokens + min(int64_t{token}, geometry.tokens - 1)) * geometry.in_features + row;
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
__global__ void __launch_bounds__(kWarpSize* C::kWarps, C::kQ > 0 && C::kWarps * C::kTokens <= 8 ? 4 : 1)
    SpmvKernel(const __grid_constant__ Problem problem, const SpmvPlan plan) {
  using Value = typename C::Value;
  using Acc = typename C::Acc;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t out = geometry.out_features, batch = blockIdx.z;
  const int64_t column = int64_t{blockIdx.x} * C::kColumns + lane;
  const int first = blockIdx.y * plan.split_windows;
  const int last = static_cast<int>(min(int64_t{first} + plan.split_windows, geometry.windows));
  const int q = C::kQ > 0 ? C::kQ : geometry.q;

  // A column beyond the last is read as the last and not stored.
  const int64_t origin = (batch * geometry.windows + first + warp) * out + min(column, out - 1);
  const uint32_t* mask = problem.mask + origin;
  const char* values = static_cast<const char*>(problem.values.data) + origin * q * sizeof(Value);
  const int64_t mask_step = C::kWarps * out, values_step = mask_step * q * static_cast<int64_t>(sizeof(Value));

  using Column = KeptColumn<Value, C::kQ == 0 ? 1 : C::kQ>;
  Column next[C::kUnroll];
  uint32_t next_bits[C::kUnroll];
  const char* next_values[C::kUnroll];  // kQ = 0: read when multiplied
  auto load = [&](int window) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) {
      if (window + u * C::kWarps < last) {
        next_bits[u] = __ldg(mask);
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
  int window = first + warp;
  load(window);

  Acc* x = reinterpret_cast<Acc*>(shared + C::kLead);
  const int64_t stride = int64_t{plan.chunk_windows} * kWindow;
  Acc* sums = x + C::kTokens * stride;
  if (threadIdx.x < C::kLead / 4) reinterpret_cast<Acc*>(shared)[threadIdx.x] = 0;

  Acc high[C::kTokens] = {}, low[C::kTokens] = {};
  for (int chunk = first; chunk < last; chunk += plan.chunk_windows) {
    const int chunk_end = min(chunk + plan.chunk_windows, last);
    if (chunk != first) __syncthreads();
    StageChunk<C>(problem, batch, chunk, chunk_end - chunk, stride, x);
    __syncthreads();

    // The plan makes chunks whole numbers of kWarps * kUnroll windows, but for the last.
    for (; window < chunk_end; window += C::kWarps * C::kUnroll) {
      Column kept[C::kUnroll];
      uint32_t bits[C::kUnroll];
      const char* kept_values[C::kUnroll];
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) kept[u] = next[u], bits[u] = next_bits[u], kept_values[u] = next_values[u];
      load(window + C::kWarps * C::kUnroll);
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        if (window + u * C::kWarps >= last) break;
        const Acc* rows = x + (window + u * C::kWarps - chunk) * kWindow;
        if constexpr (C::kQ > 0) {
          kept[u].Prepare();
          uint32_t reversed = __brev(bits[u]);
#pragma unroll
          for (int j = 0; j < (C::kQ + 1) / 2; ++j) {
            const int top = HighestBit(bits[u]);
            bits[u] ^= Bit(top);
            MultiplyKept<C>(kept[u].template At<Acc>(C::kQ - 1 - j), rows, stride, top, high);
            if (j < C::kQ / 2) {
              const int bottom = LeadingZeros(reversed);
              reversed ^= BitFromTop(bottom);
              MultiplyKept<C>(kept[u].template At<Acc>(j), rows, stride, bottom, low);
            }
          }
        } else {
          const Value* column_values = reinterpret_cast<const Value*>(kept_values[u]);
#pragma unroll 4
          for (int j = q - 1; j >= 0; --j) {
            const int top = HighestBit(bits[u]);
            bits[u] ^= Bit(top);
            MultiplyKept<C>(ToAccumulator<Acc>(column_values[j]), rows, stride, top, high);
          }
        }
      }
    }
  }

#pragma unroll
  for (int token = 0; token < C::kTokens; ++token) {
    sums[(warp * C::kTokens + token) * C::kColumns + lane] = high[token] + low[token];
  }
  __syncthreads();
  const int token = warp;
  Acc total = 0;
  if (token < C::kTokens) {
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) total += sums[(i * C::kTokens + token) * C::kColumns + lane];
  }
  if (gridDim.y > 1) {
    Acc* mine = x + token * C::kColumns + lane;  // x is no longer needed
    if (token < C::kTokens) *mine = total;
    ClusterArrive();
    ClusterWait();
    if (token < C::kTokens && blockIdx.y == 0) {
      total = 0;
      for (uint32_t rank = 0; rank < gridDim.y; ++rank) {
        const uint32_t word = LoadFromCluster(SharedAddress(mine), rank);
        Acc part;
        memcpy(&part, &word, 4);
        total += part;
      }
    }
    ClusterArrive();
    ClusterWait();  // no block leaves while another may read its sums
  }
  if (blockIdx.y == 0 && token < C::kTokens && token < geometry.tokens && column < out) {
    StoreOutput(problem, (batch * geometry.tokens + token) * out + column, batch * out + column, total);
  }
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
