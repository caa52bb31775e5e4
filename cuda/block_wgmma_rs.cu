// Launcher of block_wgmma_rs.cuh: which problems it takes, which tile runs.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.result [batch, out_features, tokens]
// (feature-major), although the shapes in problem.geometry are those of the row-major call.
#include "cuda/block_wgmma_rs.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace block_wgmma_rs {
namespace {

constexpr int kNarrow = 64, kWide = 128;  // columns of a tile

template <class C>
cudaError_t LaunchTiles(const Problem& problem, const Device& device, cudaStream_t stream) {
  Arguments a{};
  if (!kept_rows::FillArguments<C>(problem, device.multiprocessors, &a)) return cudaErrorNotSupported;
  return LaunchInClusters(ManyTokensRs<C>, static_cast<unsigned>(std::min(a.tiles, device.multiprocessors)),
                          C::kThreads, C::kSharedBytes, 1, stream, a);
}

template <class T, int kProducts>
cudaError_t LaunchOperands(const Problem& problem, const Device& device, cudaStream_t stream) {
  return problem.geometry.bn % kWide == 0 ? LaunchTiles<Config<T, kProducts, kWide>>(problem, device, stream)
                                          : LaunchTiles<Config<T, kProducts, kNarrow>>(problem, device, stream);
}

}  // namespace
}  // namespace block_wgmma_rs

cudaError_t BlockWgmmaRsSpmm(const Problem& problem, cudaStream_t stream) {
  using namespace block_wgmma_rs;  // NOLINT(build/namespaces)
  const bool float32 = problem.x.dtype == DType::kF32 && problem.precision != Precision::kHighest;
  if (!(float32 || problem.x.dtype == DType::kS8) || !kept_rows::Supports(problem, kNarrow)) {
    return cudaErrorNotSupported;
  }
  Device device;
  const cudaError_t error = QueryHopper(&device);
  if (error != cudaSuccess) return error;
  if (IsEmpty(problem.geometry)) return cudaSuccess;
  if (!float32) return LaunchOperands<int8_t, 1>(problem, device, stream);
  return problem.precision == Precision::kTf32x3 ? LaunchOperands<float, 3>(problem, device, stream)
                                                 : LaunchOperands<float, 1>(problem, device, stream);
}

}  // namespace nmsparse::cuda
