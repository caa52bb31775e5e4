// What the element-wise (block 1x1, windows of 32) kernels share: asynchronous copies, the walk over the kept
// positions of a column, and clusters.
#ifndef JAX_NMSPARSE_CUDA_EW_COMMON_CUH_
#define JAX_NMSPARSE_CUDA_EW_COMMON_CUH_

#include <algorithm>
#include <iterator>

#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace nmsparse::cuda::ew {

inline constexpr int kWindow = 32;               // rows of W per mask word
inline constexpr int64_t kMaxWindows = 1 << 24;  // row numbers stay far inside int32

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ------------------------------------------------------------------------------------------------ asynchronous copies

// kBytes (4, 8 or 16) from global to shared memory, both aligned to kBytes; zeros where !valid (nothing is read then).
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global, bool valid = true) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ----------------------------------------------------------------------------------------------------- kept positions

// Index of the highest set bit, -1 for zero: one instruction, unlike 31 - __clz(bits).
__device__ __forceinline__ int HighestBit(uint32_t bits) {
  int position;
  asm("bfind.u32 %0, %1;" : "=r"(position) : "r"(bits));
  return position;
}

// Distance of the highest set bit from bit 31, -1 for zero.
__device__ __forceinline__ int LeadingZeros(uint32_t bits) {
  int distance;
  asm("bfind.shiftamt.u32 %0, %1;" : "=r"(distance) : "r"(bits));
  return distance;
}

// 1 << position; 0 for a position outside 0..31 (PTX shifts clamp, C shifts are undefined there).
__device__ __forceinline__ uint32_t Bit(int position) {
  uint32_t bit;
  asm("shl.b32 %0, 1, %1;" : "=r"(bit) : "r"(position));
  return bit;
}

// Minus one that the compiler cannot see, so that `bits + one_hot * MinusOne()` stays a multiply-add: clearing a bit
// that way uses the FMA pipe, where xor would add to the integer pipe that limits these kernels.
__device__ __forceinline__ uint32_t MinusOne() {
  uint32_t value;
  asm volatile("mov.b32 %0, 0xffffffff;" : "=r"(value));
  return value;
}

// 0x80000000 >> distance, 0 for a distance outside 0..31.
__device__ __forceinline__ uint32_t BitFromTop(int distance) {
  uint32_t bit;
  asm("shr.u32 %0, 0x80000000, %1;" : "=r"(bit) : "r"(distance));
  return bit;
}

// ------------------------------------------------------------------------------------------------------------ clusters
// Split-K: the thread blocks of a cluster share a column block and divide the windows. Without clusters (before
// sm_90) launchers ask for one split, and these compile to nothing.

__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The word at `shared` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t LoadFromCluster(uint32_t shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t remote, word;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(remote) : "memory");
  return word;
#else
  return 0;
#endif
}

// Results of any dtype with any epilogue, out of the way of the instruction cache.
template <class Acc>
__device__ __noinline__ void StoreAnyOutput(const Problem& problem, int64_t index, int64_t feature, Acc v) {
  StoreWithEpilogue(problem, index, feature, v);
}

template <class Acc>
__device__ __forceinline__ void StoreOutput(const Problem& problem, int64_t index, int64_t feature, Acc v) {
  if (std::is_same_v<Acc, float> && problem.result.dtype == DType::kBF16 && IsIdentity(problem.epilogue)) {
    static_cast<__nv_bfloat16*>(problem.result.data)[index] = __float2bfloat16_rn(static_cast<float>(v));
  } else {
    StoreAnyOutput(problem, index, feature, v);
  }
}

// Sums the blocks' partial [C::kTokens][C::kColumns] over the cluster, each block a share of the elements, and stores
// y.
template <class C>
__device__ __forceinline__ void StorePartials(const Problem& problem, const float* partial, int64_t first_column,
                                              int64_t batch) {
  const Geometry& geometry = problem.geometry;
  const uint32_t splits = gridDim.y;
  if (splits > 1) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
  }
  const int tokens = static_cast<int>(min(int64_t{C::kTokens}, geometry.tokens));
  const int count = tokens * C::kColumns, share = (count + splits - 1) / splits;
  const int end = min(count, static_cast<int>(blockIdx.y + 1) * share);
  for (int i = blockIdx.y * share + threadIdx.x; i < end; i += kWarpSize * C::kWarps) {
    float total = 0.0f;
    if (splits > 1) {
      for (uint32_t rank = 0; rank < splits; ++rank) {
        total += __uint_as_float(LoadFromCluster(SharedAddress(partial + i), rank));
      }
    } else {
      total = partial[i];
    }
    const int64_t token = i / C::kColumns, column = first_column + i % C::kColumns;
    if (column < geometry.out_features) {
      StoreOutput(problem, (batch * geometry.tokens + token) * geometry.out_features + column,
                  batch * geometry.out_features + column, total);
    }
  }
  if (splits > 1) {
    ClusterArrive();
    ClusterWait();  // no block leaves while another may read its sums
  }
}

// The accumulators of a warp's m16n8 tiles (lane (g, t): columns g, g + 8, tokens 2 t, 2 t + 1) to y.
template <class C>
__device__ __forceinline__ void StoreFragments(const Problem& problem,
                                               const float (&sums)[C::kTiles][C::kTokenTiles][4], float* partial,
                                               int64_t first_column, int64_t batch) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int tile = 0; tile < C::kTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = (warp * C::kTiles + tile) * 16 + 8 * (i / 2) + lane / 4;
        const int token = 8 * n + 2 * (lane % 4) + i % 2;
        partial[token * C::kColumns + column] = sums[tile][n][i];
      }
    }
  }
  StorePartials<C>(problem, partial, first_column, batch);
}

// Whether the operands start where 16-byte accesses may. XLA aligns every buffer to more than that; rows inside them
// may start anywhere.
inline bool Aligned(const Problem& problem) {
  const void* const starts[] = {problem.x.data, problem.values.data, problem.mask, problem.result.data};
  return std::all_of(std::begin(starts), std::end(starts), IsAligned);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_COMMON_CUH_
