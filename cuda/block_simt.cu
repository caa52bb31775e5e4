// Launcher of block_simt: spmm for few tokens on CUDA cores (block_simt.cuh). float32, bfloat16 or float16 x with
// values of the same dtype, int8 or float8_e4m3fn; any block.
#include <algorithm>

#include "cuda/block_simt.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace {

using block::SimtConfig;
using block::SimtPlan;

inline constexpr int64_t kSharedBytes = 112 * 1024;  // of ring and x, so that two blocks fit a multiprocessor
inline constexpr int kBlocksPerMultiprocessor = 2;

template <class C>
cudaError_t LaunchSimt(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const int64_t tiles = CeilDiv(geometry.out_features, C::kTileColumns);
  const int64_t token_tiles = CeilDiv(geometry.tokens, C::kTokens);
  if (token_tiles > kMaxGridYz || geometry.batch > kMaxGridYz) return cudaErrorNotSupported;
  const int64_t room =
      int64_t{kBlocksPerMultiprocessor} * device.multiprocessors / (tiles * token_tiles * geometry.batch);
  const int64_t most = std::min<int64_t>(device.max_splits(), std::max<int64_t>(1, geometry.windows));
  SimtPlan plan{};
  plan.splits = static_cast<int32_t>(std::clamp<int64_t>(room, 1, most));
  const int64_t window_bytes = geometry.rows_per_window() * C::kTokens * 4;
  const int64_t limit = std::max(std::min<int64_t>(kSharedBytes, device.shared_bytes) - C::kRingBytes, window_bytes);
  plan.chunk_windows = static_cast<int32_t>(
      std::max<int64_t>(1, std::min(limit / window_bytes, CeilDiv(geometry.windows, plan.splits))));
  const int64_t shared = std::max<int64_t>(C::kRingBytes + plan.chunk_windows * window_bytes, C::kSumsBytes);
  if (shared > device.shared_bytes) return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>(tiles * plan.splits), static_cast<unsigned>(token_tiles),
                  static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(block::BlockSimtKernel<C>, grid, C::kThreads, shared, plan.splits, stream, problem, plan);
}

// Tokens per pass: as few as hold them all, and few enough for a window of x to fit.
template <class Value, int kColumns, int kRows>
cudaError_t LaunchForTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  cudaError_t error = cudaErrorNotSupported;
  if (geometry.bk > 1 || geometry.mask_words > 1) {
    if (geometry.tokens > 1) error = LaunchSimt<SimtConfig<Value, kColumns, kRows, 4, false>>(problem, device, stream);
    if (error != cudaErrorNotSupported) return error;
    return LaunchSimt<SimtConfig<Value, kColumns, kRows, 1, false>>(problem, device, stream);
  }
  if (geometry.tokens > 4) return LaunchSimt<SimtConfig<Value, kColumns, kRows, 8, true>>(problem, device, stream);
  if (geometry.tokens > 1) return LaunchSimt<SimtConfig<Value, kColumns, kRows, 4, true>>(problem, device, stream);
  return LaunchSimt<SimtConfig<Value, kColumns, kRows, 1, true>>(problem, device, stream);
}

template <class Value>
cudaError_t LaunchForBlock(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  constexpr int kWide = sizeof(Value) == 4 ? 4 : 8;
  const uintptr_t address = reinterpret_cast<uintptr_t>(problem.values.data);
  if (geometry.bn % kWide == 0 && address % (kWide * sizeof(Value)) == 0) {
    return LaunchForTokens<Value, kWide, 1>(problem, device, stream);
  }
  if constexpr (sizeof(Value) < 4) {
    if (geometry.bn == 4 && geometry.q * geometry.bk % 2 == 0 && address % (8 * sizeof(Value)) == 0) {
      return LaunchForTokens<Value, 4, 2>(problem, device, stream);
    }
  }
  return LaunchForTokens<Value, 1, 1>(problem, device, stream);
}

}  // namespace

cudaError_t BlockSimtSpmm(const Problem& problem, cudaStream_t stream) {
  if (IsEmpty(problem.geometry)) return cudaSuccess;
  const DType x = problem.x.dtype, values = problem.values.dtype;
  const bool float_x = x == DType::kF32 || x == DType::kBF16 || x == DType::kF16;
  if (!float_x) return cudaErrorNotSupported;
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  switch (values) {
    case DType::kS8:
      return LaunchForBlock<int8_t>(problem, device, stream);
    case DType::kF8E4M3FN:
      return LaunchForBlock<E4M3>(problem, device, stream);
    case DType::kF32:
      return x == values ? LaunchForBlock<float>(problem, device, stream) : cudaErrorNotSupported;
    case DType::kBF16:
      return x == values ? LaunchForBlock<__nv_bfloat16>(problem, device, stream) : cudaErrorNotSupported;
    case DType::kF16:
      return x == values ? LaunchForBlock<__half>(problem, device, stream) : cudaErrorNotSupported;
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace nmsparse::cuda
