// Launcher of few_t: spmm_t for few tokens on CUDA cores (few_tokens_t.cuh). float32, bfloat16 or float16 g with values
// of the same dtype, int8 or float8_e4m3fn; any pattern and block.
#include <algorithm>

#include "cuda/few_tokens_t.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace {

using block::TransposedConfig;
using block::TransposedPlan;

inline constexpr int kBlocksPerMultiprocessor = 3;  // what shared memory holds at one token

template <class C>
int64_t SharedBytes(int64_t rows) {
  return C::kRingBytes + rows * C::kTokens * 4 * (C::kWarps * kWarpSize + 1);
}

template <class C, bool kWhole>
cudaError_t LaunchTransposed(const Problem& problem, const Device& device, TransposedPlan plan, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const int64_t token_tiles = CeilDiv(geometry.tokens, C::kTokens);
  if (token_tiles > kMaxGridYz || geometry.batch > kMaxGridYz) return cudaErrorNotSupported;
  const int64_t items = geometry.windows * plan.segments;
  const int64_t tiles = CeilDiv(geometry.out_blocks * geometry.bn, C::kTileColumns);
  const int64_t wanted =
      CeilDiv(int64_t{kBlocksPerMultiprocessor} * device.multiprocessors, items * token_tiles * geometry.batch);
  const int64_t most = std::min<int64_t>(device.max_splits(), CeilDiv(tiles, 2 * C::kWarps));
  plan.splits = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1)));
  const dim3 grid(static_cast<unsigned>(items * plan.splits), static_cast<unsigned>(token_tiles),
                  static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(block::TransposedKernel<C, kWhole>, grid, C::kThreads,
                          SharedBytes<C>(int64_t{plan.units} * plan.rows), plan.splits, stream, problem, plan);
}

template <class C>
bool WindowFits(const Geometry& geometry, const Device& device) {
  return SharedBytes<C>(geometry.rows_per_window()) <= device.shared_bytes;
}

template <class Value, int kColumns, int kRows>
cudaError_t LaunchForTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const TransposedPlan window{1, geometry.window_units, geometry.bk, 1};
  const bool unit_rows = geometry.bk == 1 && geometry.mask_words == 1;
  using One = TransposedConfig<Value, kColumns, kRows, 1, true>;
  using Two = TransposedConfig<Value, kColumns, kRows, 2, true>;
  using Four = TransposedConfig<Value, kColumns, kRows, 4, true>;
  using Any = TransposedConfig<Value, kColumns, kRows, 1, false>;
  if (unit_rows) {
    if (geometry.tokens > 2) return LaunchTransposed<Four, true>(problem, device, window, stream);
    if (geometry.tokens > 1) return LaunchTransposed<Two, true>(problem, device, window, stream);
    return LaunchTransposed<One, true>(problem, device, window, stream);
  }
  if (WindowFits<Any>(geometry, device)) return LaunchTransposed<Any, true>(problem, device, window, stream);
  // Segments of about kMaskBits rows: whole units, or a part of one.
  TransposedPlan plan{};
  plan.rows = std::min(geometry.bk, kMaskBits);
  plan.units = std::min(std::max(1, kMaskBits / geometry.bk), geometry.window_units);
  plan.segments = static_cast<int32_t>(plan.rows < geometry.bk ? CeilDiv(geometry.bk, plan.rows) * geometry.window_units
                                                               : CeilDiv(geometry.window_units, plan.units));
  using Segment = TransposedConfig<Value, kColumns, 1, 4, false>;
  return LaunchTransposed<Segment, false>(problem, device, plan, stream);
}

// Element-wise and narrow blocks read several rows of a column at once.
template <class Value>
cudaError_t LaunchForBlock(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  constexpr int kWide = sizeof(Value) == 4 ? 4 : 8;
  constexpr int kLoad = kWide * sizeof(Value);
  const int kept = geometry.q * geometry.bk;
  const bool aligned = reinterpret_cast<uintptr_t>(problem.values.data) % kLoad == 0;
  if (aligned && geometry.bn % kWide == 0) return LaunchForTokens<Value, kWide, 1>(problem, device, stream);
  if (geometry.bn == 1 && aligned && kept % kWide == 0)
    return LaunchForTokens<Value, 1, kWide>(problem, device, stream);
  if constexpr (sizeof(Value) < 4) {
    if (geometry.bn == 1 && aligned && kept % 4 == 0) return LaunchForTokens<Value, 1, 4>(problem, device, stream);
    if (geometry.bn == 4 && aligned && kept % 2 == 0) return LaunchForTokens<Value, 4, 2>(problem, device, stream);
  }
  return LaunchForTokens<Value, 1, 1>(problem, device, stream);
}

}  // namespace

cudaError_t FewTokensSpmmT(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.batch == 0 || geometry.tokens == 0 || geometry.in_features == 0) return cudaSuccess;
  const DType g = problem.g.dtype, values = problem.values.dtype;
  if (g != DType::kF32 && g != DType::kBF16 && g != DType::kF16) return cudaErrorNotSupported;
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  switch (values) {
    case DType::kS8:
      return LaunchForBlock<int8_t>(problem, device, stream);
    case DType::kF8E4M3FN:
      return LaunchForBlock<E4M3>(problem, device, stream);
    case DType::kF32:
      return g == values ? LaunchForBlock<float>(problem, device, stream) : cudaErrorNotSupported;
    case DType::kBF16:
      return g == values ? LaunchForBlock<__nv_bfloat16>(problem, device, stream) : cudaErrorNotSupported;
    case DType::kF16:
      return g == values ? LaunchForBlock<__half>(problem, device, stream) : cudaErrorNotSupported;
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace nmsparse::cuda
