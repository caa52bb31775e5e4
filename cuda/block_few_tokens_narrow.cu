// block_mma for 8-bit weights, in a file of its own because each instance takes a second to compile.
#include "cuda/block_mma_launch.cuh"

namespace nmsparse::cuda::block {
namespace {

template <class Value>
cudaError_t LaunchMmaForWeight(const Problem& problem, const Device& device, cudaStream_t stream) {
  switch (problem.values.dtype) {
    case DType::kS8:
      return LaunchMmaForBlock<Value, int8_t>(problem, device, stream);
    case DType::kF8E4M3FN:
      return LaunchMmaForBlock<Value, E4M3>(problem, device, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace

cudaError_t LaunchMmaNarrow(const Problem& problem, const Device& device, cudaStream_t stream) {
  return problem.x.dtype == DType::kBF16 ? LaunchMmaForWeight<__nv_bfloat16>(problem, device, stream)
                                         : LaunchMmaForWeight<__half>(problem, device, stream);
}

}  // namespace nmsparse::cuda::block
