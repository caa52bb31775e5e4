// Which unit of a window has a given rank among the kept ones.
#ifndef JAX_NMSPARSE_CUDA_KEPT_UNITS_CUH_
#define JAX_NMSPARSE_CUDA_KEPT_UNITS_CUH_

#include "cuda/device.cuh"

namespace nmsparse::cuda {

// Position of the set bit of `bits` that has `rank` set bits below it. The last of `units` where a corrupt mask has too
// few, so that whatever the mask holds names a unit of the window.
__device__ __forceinline__ int UnitOfRank(uint32_t bits, int rank, int units) {
  if (units < kMaskBits) bits &= (1u << units) - 1;
  if (rank >= __popc(bits)) return units - 1;
  int unit = 0;
#pragma unroll
  for (int width = kMaskBits / 2; width > 0; width /= 2) {
    const int below = __popc(bits & ((1u << width) - 1));
    if (rank >= below) {
      rank -= below;
      bits >>= width;
      unit += width;
    }
  }
  return unit;
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_KEPT_UNITS_CUH_
