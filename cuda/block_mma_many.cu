// Launcher of block_mma_many.cuh: which problems it takes, which tile runs.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.result [batch, out_features, tokens]
// (feature-major), although the shapes in problem.geometry are those of the row-major call.
#include "cuda/block_mma_many.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace block_mma_many {
namespace {

// What the kernel can be asked for; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const DType x = problem.x.dtype;
  return ((x == DType::kF32 && problem.precision != Precision::kHighest) || x == DType::kBF16 || x == DType::kF16 ||
          x == DType::kS8) &&
         kept_rows::Supports(problem, kWarpSide);
}

template <class C>
cudaError_t LaunchTiles(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int64_t blocks = int64_t{device.multiprocessors} * (256 / C::kThreads);
  Arguments a{};
  if (!kept_rows::FillArguments<C>(problem, blocks, &a)) return cudaErrorNotSupported;
  return LaunchInClusters(ManyTokensMma<C>, static_cast<unsigned>(a.tiles < blocks ? a.tiles : blocks), C::kThreads,
                          C::kSharedBytes, 1, stream, a);
}

template <class T, int kProducts>
cudaError_t LaunchOperands(const Problem& problem, cudaStream_t stream) {
  using Wide = Config<T, kProducts, 128, 256, 128>;  // 8.0 and 9.0 have the shared memory
  using Narrow = Config<T, kProducts, 64, 256, 64>;  // fits the 99 KB of 8.6
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const bool wide = problem.geometry.bn % Wide::kColumns == 0 && Wide::kSharedBytes <= device.shared_bytes;
  return wide ? LaunchTiles<Wide>(problem, device, stream) : LaunchTiles<Narrow>(problem, device, stream);
}

}  // namespace
}  // namespace block_mma_many

cudaError_t BlockMmaManySpmm(const Problem& problem, cudaStream_t stream) {
  using namespace block_mma_many;  // NOLINT(build/namespaces)
  if (!Supports(problem)) return cudaErrorNotSupported;
  if (IsEmpty(problem.geometry)) return cudaSuccess;
  switch (problem.x.dtype) {
    case DType::kF32:
      return problem.precision == Precision::kTf32x3 ? LaunchOperands<float, 3>(problem, stream)
                                                     : LaunchOperands<float, 1>(problem, stream);
    case DType::kBF16:
      return LaunchOperands<__nv_bfloat16, 1>(problem, stream);
    case DType::kF16:
      return LaunchOperands<__half, 1>(problem, stream);
    default:
      return LaunchOperands<int8_t, 1>(problem, stream);
  }
}

}  // namespace nmsparse::cuda
