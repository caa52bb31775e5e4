// float32 as TF32 operands.
#ifndef JAX_NMSPARSE_CUDA_TF32_CUH_
#define JAX_NMSPARSE_CUDA_TF32_CUH_

#include <cstdint>

namespace nmsparse::cuda {

// float32 to the nearest TF32, ties away from zero.
__device__ __forceinline__ uint32_t RoundToTf32(float v) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
  return rounded;
}

// The bits of v become its nearest TF32; returns that of what is left: together 22 significant bits.
__device__ __forceinline__ uint32_t SplitToTf32(uint32_t& v) {
  const float whole = __uint_as_float(v);
  v = RoundToTf32(whole);
  return RoundToTf32(whole - __uint_as_float(v));
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_TF32_CUH_
