// Launcher of block_t_mma: spmm_t for few tokens, vector-wise weights (block_t_mma.cuh). bfloat16 or float16 g and
// values of one dtype, units of one row, windows of 32 units, bn a multiple of 64, at most 16 kept rows per window.
#include <algorithm>

#include "cuda/block_t_mma.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace {

using block::TransposedMmaConfig;
using block::TransposedMmaPlan;

template <class C>
int64_t SharedBytes(int windows_each) {
  return C::kRingBytes + C::kRowsBytes + int64_t{C::kWarps} * windows_each * kMaskBits * C::kPitch * 4;
}

template <class C>
cudaError_t LaunchTransposedMma(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  TransposedMmaPlan plan{};
  plan.windows_each = std::max(1, C::kRows / geometry.q);
  while (plan.windows_each > 1 && SharedBytes<C>(plan.windows_each) > device.shared_bytes) --plan.windows_each;
  const int64_t shared = SharedBytes<C>(plan.windows_each);
  // Fewer windows than rows for them waste the tensor cores: rather fewer tokens at a time.
  if (shared > device.shared_bytes || (C::kTokenTiles > 1 && plan.windows_each * geometry.q <= C::kRows / 2)) {
    return cudaErrorNotSupported;
  }
  plan.aligned_g = geometry.out_features % 8 == 0 && IsAligned(problem.g.data);
  const int64_t groups = CeilDiv(geometry.windows, C::kWarps * plan.windows_each);
  const int64_t token_tiles = CeilDiv(geometry.tokens, C::kTokens);
  const int64_t most = std::min<int64_t>(device.max_splits(), std::max<int64_t>(1, geometry.out_blocks));
  double best = 0;
  for (int splits = 1; splits <= most; ++splits) {
    const int at_once = BlocksAtOnce<C>(block::BlockTransposedMmaKernel<C>, device, C::kThreads, shared, splits);
    const double cost =
        static_cast<double>(CeilDiv(groups * splits * token_tiles * geometry.batch, at_once)) / splits + 0.01 * splits;
    if (plan.splits == 0 || cost < best) best = cost, plan.splits = splits;
  }
  const dim3 grid(static_cast<unsigned>(groups * plan.splits), static_cast<unsigned>(token_tiles),
                  static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(block::BlockTransposedMmaKernel<C>, grid, C::kThreads, shared, plan.splits, stream, problem,
                          plan);
}

template <class Value>
cudaError_t LaunchForTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  cudaError_t error = cudaErrorNotSupported;
  if (tokens > 32) error = LaunchTransposedMma<TransposedMmaConfig<Value, 8>>(problem, device, stream);
  if (tokens > 16 && error == cudaErrorNotSupported) {
    error = LaunchTransposedMma<TransposedMmaConfig<Value, 4>>(problem, device, stream);
  }
  if (tokens > 8 && error == cudaErrorNotSupported) {
    error = LaunchTransposedMma<TransposedMmaConfig<Value, 2>>(problem, device, stream);
  }
  if (error == cudaErrorNotSupported) {
    error = LaunchTransposedMma<TransposedMmaConfig<Value, 1>>(problem, device, stream);
  }
  return error;
}

}  // namespace

cudaError_t BlockMmaSpmmT(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.batch == 0 || geometry.tokens == 0 || geometry.in_features == 0) return cudaSuccess;
  const DType dtype = problem.g.dtype;
  if (dtype != problem.values.dtype || (dtype != DType::kBF16 && dtype != DType::kF16)) return cudaErrorNotSupported;
  if (geometry.bk != 1 || geometry.window_units != kMaskBits || geometry.bn % 64 != 0 || geometry.q > 16 ||
      geometry.batch > kMaxGridYz || geometry.tokens > 8 * kMaxGridYz || !IsAligned(problem.values.data)) {
    return cudaErrorNotSupported;
  }
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  if (dtype == DType::kBF16) return LaunchForTokens<__nv_bfloat16>(problem, device, stream);
  return LaunchForTokens<__half>(problem, device, stream);
}

}  // namespace nmsparse::cuda
