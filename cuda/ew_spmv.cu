// Launcher of "ew_spmv": element-wise weights, windows of 32, one to four tokens, CUDA cores (ew_spmv.cuh).
//
//   x                  values            sums      q
//   f32, bf16, f16     f32, bf16, f16    float     any of 1..31; 2, 3, 4, 6, 8, 12, 16, 24 as constants (tokens > 1: 4,
//   8, 16) f32, bf16, f16     s8, f8e4m3fn      float     any; 4, 8, 16 as constants f8e4m3fn           f8e4m3fn float
//   any; 4, 8, 16 as constants s8                 s8                int32     any; 4, 8, 16 as constants
#include "cuda/ew_spmv.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

using ew::SpmvConfig;
using ew::SpmvPlan;

inline constexpr int64_t kMaxTokens = 4;
inline constexpr int64_t kRowBudget = 64 << 10;  // bytes of x per block: three blocks of 8 warps share a multiprocessor

template <class C>
cudaError_t Launch(const Problem& problem, const Device& device, int64_t splits, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  constexpr int64_t kStep = C::kWarps * C::kUnroll;  // windows that a block takes at once
  splits = std::min(splits, CeilDiv(geometry.windows, kStep));
  SpmvPlan plan;
  plan.split_windows = static_cast<int32_t>(CeilDiv(geometry.windows, splits));
  splits = CeilDiv(geometry.windows, plan.split_windows);
  const int64_t budget = kRowBudget / (4 * ew::kWindow * C::kTokens) / kStep * kStep;
  plan.chunk_windows = static_cast<int32_t>(std::min(CeilDiv(plan.split_windows, kStep) * kStep, budget));
  if (C::SharedBytes(plan.chunk_windows) > device.shared_bytes) return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>(CeilDiv(geometry.out_features, C::kColumns)), static_cast<unsigned>(splits),
                  static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(ew::SpmvKernel<C>, grid, kWarpSize * C::kWarps, C::SharedBytes(plan.chunk_windows),
                          dim3(1, grid.y), stream, problem, plan);
}

// Windows that a warp takes at once, so that a lane asks for about 64 bytes.
template <class Value, int kQ, int kLaneColumns>
constexpr int Unroll() {
  constexpr int kBytes = kQ * kLaneColumns * static_cast<int>(sizeof(Value));
  return kQ == 0 ? 2 : kBytes >= 48 ? 1 : kBytes >= 12 ? 2 : 3;
}

template <class Value, class Acc, int kQ>
cudaError_t LaunchTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const int64_t most = device.max_splits();
  constexpr int kBytes = kQ * static_cast<int>(sizeof(Value));
  constexpr int kUnroll = Unroll<Value, kQ, 1>();
  int64_t splits = 1;
  if (geometry.tokens > 1) {
    const int64_t blocks = CeilDiv(geometry.out_features, kWarpSize) * geometry.batch;
    while (splits < most && 2 * blocks * splits < 3 * device.multiprocessors) splits *= 2;
    // Fewer constants here than for one token.
    constexpr int kFewQ = kQ == 4 || kQ == 8 || kQ == 16 ? kQ : 0;
    constexpr int kFewUnroll = Unroll<Value, kFewQ, 1>();
    if constexpr (kFewQ == 16) {
      if (geometry.tokens == 2)
        return Launch<SpmvConfig<Value, Acc, 16, 2, 8, kFewUnroll>>(problem, device, splits, stream);
    }
    return Launch<SpmvConfig<Value, Acc, kFewQ, 4, 8, (kFewUnroll + 1) / 2>>(problem, device, splits, stream);
  }
  // Short columns: two per lane, for wider loads.
  constexpr int kLaneColumns = kQ > 0 && kBytes <= 8 ? 2 : 1;
  if (kLaneColumns == 2 && geometry.out_features % 2 == 0) {
    const int64_t blocks = CeilDiv(geometry.out_features, 2 * kWarpSize) * geometry.batch;
    while (splits < most && 4 * blocks * splits < 3 * device.multiprocessors) splits *= 2;
    constexpr int kPairUnroll = Unroll<Value, kQ, kLaneColumns>();
    return Launch<SpmvConfig<Value, Acc, kQ, 1, 16, kPairUnroll, kLaneColumns>>(problem, device, splits, stream);
  }
  // About one block per multiprocessor: 16 warps each, or two such blocks where columns are short and long rows many.
  // Otherwise blocks of 8 warps, at least two per multiprocessor.
  const int64_t blocks = CeilDiv(geometry.out_features, kWarpSize) * geometry.batch;
  while (splits < most && 4 * blocks * splits < 3 * device.multiprocessors) splits *= 2;
  if (blocks * splits <= device.multiprocessors) {
    if (kBytes <= 16 && geometry.windows / splits >= 256 && splits < most) splits *= 2;
    return Launch<SpmvConfig<Value, Acc, kQ, 1, 16, kUnroll>>(problem, device, splits, stream);
  }
  if (splits < most && blocks * splits < 2 * device.multiprocessors) splits *= 2;
  if constexpr (kBytes == 32 && sizeof(Value) == 2) {
    // A little more than the four blocks that a multiprocessor holds at once: half as many, of twice the columns, so
    // that no second wave of few blocks follows.
    const int64_t wave = 4 * device.multiprocessors;
    if (blocks > wave && 2 * blocks <= 3 * wave && geometry.out_features % 2 == 0) {
      return Launch<SpmvConfig<Value, Acc, kQ, 1, 8, 1, 2>>(problem, device, 1, stream);
    }
  }
  return Launch<SpmvConfig<Value, Acc, kQ, 1, 8, kUnroll>>(problem, device, splits, stream);
}

template <class Value, class Acc>
cudaError_t LaunchQ(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int32_t q = problem.geometry.q;
  if (q == 4) return LaunchTokens<Value, Acc, 4>(problem, device, stream);
  if (q == 8) return LaunchTokens<Value, Acc, 8>(problem, device, stream);
  if (q == 16) return LaunchTokens<Value, Acc, 16>(problem, device, stream);
  if constexpr (sizeof(Value) > 1) {  // the compile time of more constants buys less for bytes
    if (q == 2) return LaunchTokens<Value, Acc, 2>(problem, device, stream);
    if (q == 3) return LaunchTokens<Value, Acc, 3>(problem, device, stream);
    if (q == 6) return LaunchTokens<Value, Acc, 6>(problem, device, stream);
    if (q == 12) return LaunchTokens<Value, Acc, 12>(problem, device, stream);
    if (q == 24) return LaunchTokens<Value, Acc, 24>(problem, device, stream);
  }
  return LaunchTokens<Value, Acc, 0>(problem, device, stream);
}

}  // namespace

cudaError_t EwSpmv(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.bk != 1 || geometry.bn != 1 || geometry.window_units != ew::kWindow || geometry.q < 1 ||
      geometry.q >= ew::kWindow || geometry.tokens > kMaxTokens || geometry.batch > 65535 ||
      geometry.windows > ew::kMaxWindows || !ew::Aligned(problem) ||
      CeilDiv(geometry.out_features, kWarpSize) > kMaxBlocks) {
    return cudaErrorNotSupported;
  }
  Device device;
  if (const cudaError_t error = QueryDevice(&device); error != cudaSuccess) return error;
  const DType x = problem.x.dtype;
  const bool integers = x == DType::kS8;
  if (x == DType::kF64 || x == DType::kS32 || integers != (integers && problem.values.dtype == DType::kS8)) {
    return cudaErrorNotSupported;
  }
  switch (problem.values.dtype) {
    case DType::kF32:
      return LaunchQ<float, float>(problem, device, stream);
    case DType::kBF16:
      return LaunchQ<__nv_bfloat16, float>(problem, device, stream);
    case DType::kF16:
      return LaunchQ<__half, float>(problem, device, stream);
    case DType::kF8E4M3FN:
      return LaunchQ<E4M3, float>(problem, device, stream);
    case DType::kS8:
      return integers ? LaunchQ<int8_t, int32_t>(problem, device, stream)
                      : LaunchQ<int8_t, float>(problem, device, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace nmsparse::cuda
