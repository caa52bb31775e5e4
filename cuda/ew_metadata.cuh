// The mask of a weight with 2 of every 4 rows kept, as the metadata of sparse tensor cores.
#ifndef JAX_NMSPARSE_CUDA_EW_METADATA_CUH_
#define JAX_NMSPARSE_CUDA_EW_METADATA_CUH_

#include <cstdint>

namespace nmsparse::cuda::ew {

// `groups`: eight groups of four mask bits b3 b2 b1 b0, two of them set. Returns the two positions of each: the lower
// is 0 with b0, 1 with b1 but not b0, else 2; the higher is 3 with b3, else 2 with b2, else 1.
__device__ __forceinline__ uint32_t Metadata(uint32_t groups) {
  const uint32_t right = groups >> 1, left = groups << 1;
  return (~groups & right & 0x11111111u) | (~left & ~groups & 0x22222222u) | ((right | ~groups) & 0x44444444u) |
         ((groups | left) & 0x88888888u);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_METADATA_CUH_
