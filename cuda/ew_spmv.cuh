// One to three tokens, element-wise weights: bytes decide, so CUDA cores multiply per kept element.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  x[token, 32 w + k] * value
//
// A lane owns a column. It walks the set bits of the column's mask word and reads x[k] from shared memory: the 32 words
// of a window are the 32 banks, so lanes at different k meet different banks and lanes at the same k share one read.
// The walk starts at both ends of the word at once (two short dependent chains instead of one long one).
//
// Layouts. values [windows, out_features, q]: the q kept values of a column are contiguous, and the 32 columns of a warp
// are one contiguous run per window. mask [windows, out_features].
// A block owns 32 columns and one of `gridDim.y` equal shares of the windows; its warps take the windows in turn.
//
// Shared memory, bytes:
//   0                16                     words before x, so that the position -1 of a corrupt mask stays inside
//   16               4 * kTokens * rows     x of the chunk of windows at hand, as accumulators, [token][row]
//   then             kWarps * kStages * C::kStageBytes   the warps' rings: [values of 32 columns][32 mask words]
//   reused at the end: kWarps * kTokens * 32 partial sums.
// Synchronisation: a warp's ring is private: cp.async groups and __syncwarp. x: one barrier after it is staged (the
// first stages of weights are then already on their way), two per further chunk. Sums are added over warps and over the
// blocks of the cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPMV_CUH_

#include "cuda/ew_common.cuh"

namespace nmsparse::cuda::ew {

// kQ = 0: q is known at run time only.
template <class Value_, class Acc_, int kQ_, int kTokens_, int kWarps_, int kStages_>
struct SpmvConfig {
  using Value = Value_;
  using Acc = Acc_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kStages = kStages_;
  static constexpr int kColumns = kWarpSize;
  static constexpr int kLargestQ = kQ > 0 ? kQ : kWindow - 1;
  static constexpr int kColumnBytes = kQ * static_cast<int>(sizeof(Value));
  static constexpr int kStageBytes = kColumns * (kLargestQ * static_cast<int>(sizeof(Value)) + 4);
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kLead = 16;
  // 16-byte pieces of a column that would meet the same banks in 8 neighbouring lanes are exchanged (Swizzle).
  static constexpr int kPieces = kColumnBytes % 16 == 0 ? kColumnBytes / 16 : 0;
  static constexpr bool kSwizzled = kPieces == 2 || kPieces == 4;
  static_assert(kStageBytes % 16 == 0, "stages begin at 16-byte boundaries");
  static_assert(kRingBytes >= kWarps * kTokens * kColumns * 4, "the partial sums fit where the rings were");
  static_assert(sizeof(Acc) == 4, "x is staged as one bank word per row");

  static __host__ __device__ int64_t SharedBytes(int64_t chunk_windows) {
    return kLead + int64_t{4} * kTokens * kWindow * chunk_windows + kRingBytes;
  }
  // Offset inside a stage of byte `offset` of the run of 32 columns.
  static __device__ __forceinline__ int Swizzle(int offset) {
    if constexpr (kSwizzled) return offset ^ ((offset >> 7 & (kPieces - 1)) << 4);
    return offset;
  }
};

struct SpmvPlan {
  int32_t split_windows;  // windows per block
  int32_t chunk_windows;  // of which x is staged at a time
  int32_t copy_bytes;     // 16, 8 or 4: what every run of 32 columns is aligned to; less: copied by elements
};

// Bytes [0, bytes) of a run of columns into a stage. `bytes` is a multiple of kBytes.
template <class C, int kBytes>
__device__ __forceinline__ void CopyRun(uint32_t stage, const char* run, int bytes, int lane) {
  if constexpr (C::kQ > 0) {
    constexpr int kWhole = C::kColumns * C::kColumnBytes;
#pragma unroll
    for (int i = 0; i < kWhole; i += kWarpSize * kBytes) {
      const int offset = i + lane * kBytes;
      if (offset < bytes) CopyAsync<kBytes>(stage + C::Swizzle(offset), run + offset);
    }
  } else {
    for (int offset = lane * kBytes; offset < bytes; offset += kWarpSize * kBytes) {
      CopyAsync<kBytes>(stage + offset, run + offset);
    }
  }
}

// The values of one column from shared memory, widest aligned loads first.
template <class C>
__device__ __forceinline__ void LoadColumn(const char* stage, int lane, typename C::Value (&values)[C::kLargestQ]) {
  constexpr int kBytes = ColumnAlignment(C::kColumnBytes);
  char* out = reinterpret_cast<char*>(values);
#pragma unroll
  for (int i = 0; i < C::kColumnBytes; i += kBytes) {
    const char* in = stage + C::Swizzle(lane * C::kColumnBytes + i);
    if constexpr (kBytes == 16) {
      const uint4 raw = *reinterpret_cast<const uint4*>(in);
      memcpy(out + i, &raw, 16);
    } else if constexpr (kBytes == 8) {
      const uint2 raw = *reinterpret_cast<const uint2*>(in);
      memcpy(out + i, &raw, 8);
    } else if constexpr (kBytes == 4) {
      const uint32_t raw = *reinterpret_cast<const uint32_t*>(in);
      memcpy(out + i, &raw, 4);
    } else if constexpr (kBytes == 2) {
      const uint16_t raw = *reinterpret_cast<const uint16_t*>(in);
      memcpy(out + i, &raw, 2);
    } else {
      out[i] = *in;
    }
  }
}

template <class C>
__device__ __forceinline__ void MultiplyKept(typename C::Acc weight, const char* x, int64_t token_bytes, int row,
                                             typename C::Acc (&sum)[C::kTokens]) {
  const char* at = x + row * 4;
#pragma unroll
  for (int token = 0; token < C::kTokens; ++token) {
    sum[token] += weight * *reinterpret_cast<const typename C::Acc*>(at + token * token_bytes);
  }
}

template <class C>
__global__ void __launch_bounds__(kWarpSize* C::kWarps) SpmvKernel(const Problem problem, const SpmvPlan plan) {
  using Value = typename C::Value;
  using Acc = typename C::Acc;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);
  const int q = C::kQ > 0 ? C::kQ : geometry.q;
  const int64_t column = int64_t{blockIdx.x} * C::kColumns;
  const int columns = static_cast<int>(min(int64_t{C::kColumns}, geometry.out_features - column));
  const int64_t batch = blockIdx.z;
  const int64_t row_bytes = geometry.out_features * q * static_cast<int64_t>(sizeof(Value));

  const char* values = static_cast<const char*>(problem.values.data) +
                       (batch * geometry.windows * geometry.out_features + column) * q * int64_t{sizeof(Value)};
  const uint32_t* mask = problem.mask + batch * geometry.windows * geometry.out_features + column;
  const int64_t first = int64_t{blockIdx.y} * plan.split_windows;
  const int64_t last = min(first + plan.split_windows, geometry.windows);

  char* x = shared + C::kLead;
  const int64_t token_bytes = int64_t{plan.chunk_windows} * kWindow * 4;
  char* ring = x + C::kTokens * token_bytes + warp * C::kStages * C::kStageBytes;
  constexpr int kMaskOffset = C::kStageBytes - 4 * C::kColumns;

  auto load_stage = [&](int64_t window, int slot) {
    if (window < last) {
      char* stage = ring + slot * C::kStageBytes;
      const uint32_t at = SharedAddress(stage);
      const char* run = values + window * row_bytes;
      const int bytes = columns * q * static_cast<int>(sizeof(Value));
      if (plan.copy_bytes == 16) {
        CopyRun<C, 16>(at, run, bytes, lane);
      } else if (plan.copy_bytes == 8) {
        CopyRun<C, 8>(at, run, bytes, lane);
      } else if (plan.copy_bytes == 4) {
        CopyRun<C, 4>(at, run, bytes, lane);
      } else {
        for (int i = lane; i < columns * q; i += kWarpSize) {
          const int offset = i * static_cast<int>(sizeof(Value));
          *reinterpret_cast<Value*>(stage + C::Swizzle(offset)) = *reinterpret_cast<const Value*>(run + offset);
        }
      }
      if (lane < columns) CopyAsync<4>(at + kMaskOffset + lane * 4, mask + window * geometry.out_features + lane);
    }
    CommitCopies();
  };

  int64_t next = first + warp;  // the next window to ask for
  int fill = 0, slot = 0;
#pragma unroll 1
  for (int i = 0; i < C::kStages - 1; ++i) {
    load_stage(next, fill);
    next += C::kWarps;
    fill = fill + 1;
  }

  Acc high[C::kTokens] = {}, low[C::kTokens] = {};
  int64_t window = first + warp;
  for (int64_t chunk = first; chunk < last; chunk += plan.chunk_windows) {
    const int64_t chunk_end = min(chunk + plan.chunk_windows, last);
    if (chunk != first) __syncthreads();
    WithInputType<Acc>(problem.x.dtype, [&](auto zero) {
      using X = decltype(zero);
      const X* source = static_cast<const X*>(problem.x.data) + batch * geometry.tokens * geometry.in_features;
      const int64_t row0 = chunk * kWindow;
      const int rows = static_cast<int>(chunk_end - chunk) * kWindow;
#pragma unroll
      for (int token = 0; token < C::kTokens; ++token) {
        Acc* staged = reinterpret_cast<Acc*>(x + token * token_bytes);
        const X* row = source + token * geometry.in_features + row0;
        const bool whole = token < geometry.tokens && row0 + rows <= geometry.in_features;
        constexpr int kVector = 16 / sizeof(X);
        if (whole && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
#pragma unroll 2
          for (int i = threadIdx.x * kVector; i < rows; i += blockDim.x * kVector) {
            const uint4 raw = *reinterpret_cast<const uint4*>(row + i);
            X part[kVector];
            memcpy(part, &raw, 16);
            Acc wide[kVector];
#pragma unroll
            for (int j = 0; j < kVector; ++j) wide[j] = ToAccumulator<Acc>(part[j]);
#pragma unroll
            for (int j = 0; j < kVector; j += 4) {
              uint4 quad;
              memcpy(&quad, wide + j, 16);
              *reinterpret_cast<uint4*>(staged + i + j) = quad;
            }
          }
        } else {
          for (int i = threadIdx.x; i < rows; i += blockDim.x) {
            const bool inside = token < geometry.tokens && row0 + i < geometry.in_features;
            staged[i] = inside ? ToAccumulator<Acc>(row[i]) : Acc(0);
          }
        }
      }
    });
    __syncthreads();

    for (; window < chunk_end; window += C::kWarps) {
      WaitCopies<C::kStages - 2>();
      __syncwarp();
      load_stage(next, fill);  // overwrites the stage read in the step before
      next += C::kWarps;
      fill = fill + 1 == C::kStages ? 0 : fill + 1;
      const char* stage = ring + slot * C::kStageBytes;
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
      const char* rows = x + (window - chunk) * (kWindow * 4);
      uint32_t bits = reinterpret_cast<const uint32_t*>(stage + kMaskOffset)[lane];
      if constexpr (C::kQ > 0) {
        Value kept[C::kLargestQ];
        LoadColumn<C>(stage, lane, kept);
        uint32_t reversed = __brev(bits);
#pragma unroll
        for (int j = 0; j < (C::kQ + 1) / 2; ++j) {
          const int top = HighestBit(bits);
          bits ^= Bit(top);
          MultiplyKept<C>(ToAccumulator<Acc>(kept[C::kQ - 1 - j]), rows, token_bytes, top, high);
          if (j < C::kQ / 2) {
            const int bottom = LeadingZeros(reversed);
            reversed ^= BitFromTop(bottom);
            MultiplyKept<C>(ToAccumulator<Acc>(kept[j]), rows, token_bytes, bottom, low);
          }
        }
      } else {
        const Value* kept = reinterpret_cast<const Value*>(stage) + lane * q;
        for (int j = q - 1; j >= 0; --j) {
          const int top = HighestBit(bits);
          bits ^= Bit(top);
          MultiplyKept<C>(ToAccumulator<Acc>(kept[j]), rows, token_bytes, top, high);
        }
      }
    }
  }

  // Partial sums: over the warps, then over the blocks of the cluster.
  WaitCopies<0>();
  __syncthreads();
  Acc* sums = reinterpret_cast<Acc*>(x + C::kTokens * token_bytes);
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
    Acc* mine = reinterpret_cast<Acc*>(x) + token * C::kColumns + lane;  // x is no longer needed
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
  if (blockIdx.y == 0 && token < C::kTokens && token < geometry.tokens && lane < columns) {
    const int64_t feature = column + lane;
    StoreWithEpilogue(problem, (batch * geometry.tokens + token) * geometry.out_features + feature,
                      batch * geometry.out_features + feature, total);
  }
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
