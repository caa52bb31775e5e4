// Hopper's asynchronous copies: transaction barriers in shared memory (mbarrier), tensor maps, the copy engine (TMA),
// and the exchange of registers between warpgroups. sm_90 and newer.
#ifndef JAX_NMSPARSE_CUDA_TMA_CUH_
#define JAX_NMSPARSE_CUDA_TMA_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/problem.h"

namespace nmsparse::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// -------------------------------------------------------------------------------------------------------- barriers

// A phase of a barrier ends when `arrivals` threads have arrived and all announced bytes have landed. Waits name the
// parity of the phase they wait for; waiting for parity 1 on a fresh barrier returns at once.
__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when the cp.async copies that this thread has issued so far have landed.
__device__ __forceinline__ void BarrierArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase has ended; does not wait.
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

__device__ __forceinline__ void StoreShared16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Makes ordinary shared-memory accesses and those of the copy engine and the tensor cores see each other in order.
__device__ __forceinline__ void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 to 15) of `threads` threads of the block.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------------------------------- clusters

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster.
__device__ __forceinline__ void ClusterBarrier() {
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
// The shared-memory address in block `rank` of the cluster that is `address` here.
__device__ __forceinline__ uint32_t Elsewhere(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Arrives at the barrier that lies where `barrier` does in the block of that rank.
__device__ __forceinline__ void BarrierArriveAt(uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(Elsewhere(barrier, rank)) : "memory");
}

// The same, after which the waiter by ClusterBarrierWait sees what the warp has written to its shared memory.
__device__ __forceinline__ void ClusterBarrierArrive(uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(Elsewhere(barrier, rank))
               : "memory");
}
__device__ __forceinline__ void ClusterBarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Writes where `address` lies in the block of that rank.
__device__ __forceinline__ void StoreElsewhere(uint32_t address, int rank, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(Elsewhere(address, rank)), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

// Arrives at barrier `id` without waiting: others wait for it by NamedBarrier of the same number of threads.
__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One position of a ring of shared-memory slots and the parity of its current round.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ------------------------------------------------------------------------------------------------------- registers

// Warpgroups hand registers from the pool to each other; every warp of the warpgroup calls it.
template <int kRegisters>
__device__ __forceinline__ void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void ClaimRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// One lane of a converged warp.
__device__ __forceinline__ bool ElectOne() {
  uint32_t elected;
  asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }" : "=r"(elected));
  return elected != 0;
}

// --------------------------------------------------------------------------------------------------------- copies

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (c0, c1, c2) of a 3-axis map -> shared memory; elements outside the tensor are zeros and count as bytes.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
// The same for a 4-axis and a 5-axis map.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                        int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                        int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// The same into the same place of every block of the cluster whose bit is set in `blocks`; each block's barrier at the
// place of `barrier` counts the bytes.
__device__ __forceinline__ void LoadBoxMulticast(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint16_t blocks,
                                                 int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void LoadBoxMulticast(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint16_t blocks,
                                                 int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// A run of global memory -> shared memory: addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void LoadBytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Shared memory -> box at (c0, c1, c2); elements outside the tensor are not written.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ __forceinline__ void StoreCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending committed stores of this thread still read shared memory.
template <int kPending>
__device__ __forceinline__ void StoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// 16 bytes of global memory -> shared memory: the first `bytes` (0 or 16) of them, then zeros. Nothing else is read.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// ---------------------------------------------------------------------------------------------- tensor maps (host)

// Describes a row-major tensor of 16-bit elements, axes from the innermost, and the box that one copy moves. The box's
// innermost axis fills one line of 128 bytes, swizzled as wgmma.cuh states, or what another swizzle says.
struct TensorMapSpec {
  CUtensorMapDataType dtype;
  const void* data;  // 16-byte aligned
  int axes;
  uint64_t sizes[5];
  uint64_t strides[4];  // bytes, of axes 1 and up; multiples of 16
  uint32_t box[5];
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
};

inline cudaError_t EncodeTensorMap(const TensorMapSpec& spec, CUtensorMap* map) {
  // The driver's function is looked up at run time, so that the module loads on a machine without a driver.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr unsigned kSince = 12000;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      return Encode{nullptr};
    }
    return reinterpret_cast<Encode>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  cuuint64_t sizes[5], strides[4];
  for (int i = 0; i < spec.axes; ++i) sizes[i] = spec.sizes[i];
  for (int i = 0; i + 1 < spec.axes; ++i) strides[i] = spec.strides[i];
  const CUresult result = encode(map, spec.dtype, static_cast<cuuint32_t>(spec.axes), const_cast<void*>(spec.data),
                                 sizes, strides, spec.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, spec.swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline CUtensorMapDataType MapType(DType dtype) {
  return dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Feature-major activations, [batch, rows, tokens] of 16-bit elements, in boxes of one line (64 tokens).
inline TensorMapSpec TokensMap(const void* data, DType dtype, const Geometry& g, int64_t rows, int box_rows) {
  const uint64_t row = g.tokens * 2;
  return {MapType(dtype),
          data,
          3,
          {uint64_t(g.tokens), uint64_t(rows), uint64_t(g.batch)},
          {row, row * rows},
          {64, uint32_t(box_rows), 1}};
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_TMA_CUH_
