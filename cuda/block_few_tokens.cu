// block_mma: few tokens times vector- and block-wise weights on tensor cores. x bfloat16 or float16; values of its
// dtype (bn a multiple of 16), int8 or float8_e4m3fn (bn a multiple of 32).
#include "cuda/block_mma_launch.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {

cudaError_t BlockMmaSpmm(const Problem& problem, cudaStream_t stream) {
  if (IsEmpty(problem.geometry)) return cudaSuccess;
  const DType x = problem.x.dtype, values = problem.values.dtype;
  if (x != DType::kBF16 && x != DType::kF16) return cudaErrorNotSupported;
  if (problem.geometry.batch > kMaxGridYz || problem.geometry.tokens > 8 * kMaxGridYz) return cudaErrorNotSupported;
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  if (values != x) return block::LaunchMmaNarrow(problem, device, stream);
  if (x == DType::kBF16) return block::LaunchMmaForBlock<__nv_bfloat16, __nv_bfloat16>(problem, device, stream);
  return block::LaunchMmaForBlock<__half, __half>(problem, device, stream);
}

}  // namespace nmsparse::cuda
