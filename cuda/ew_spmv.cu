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
inline constexpr int64_t kRowBudget = 128 << 10;  // bytes of x per block
inline constexpr int64_t kMaxColumns = 512;       // of a block

// The columns of a block that finish first: whole waves of one block per multiprocessor, and what a block costs besides
// its columns (about a microsecond, in columns of this depth at 33 bytes per nanosecond).
template <class C>
int64_t ChooseColumns(const Geometry& geometry, const ew::Device& device) {
  constexpr int64_t kStep = 8;
  const double column_bytes = static_cast<double>(geometry.windows) * (geometry.q * sizeof(typename C::Value) + 4);
  const double overhead = 33e3 / column_bytes;
  int64_t best = 0;
  double best_cost = 0;
  for (int64_t columns = kStep; columns <= std::min<int64_t>(kMaxColumns, C::kThreads * C::kLaneColumns);
       columns += kStep) {
    const int64_t blocks = CeilDiv(geometry.out_features, columns) * geometry.batch;
    const double cost =
        static_cast<double>(CeilDiv(blocks, device.multiprocessors)) * (static_cast<double>(columns) + overhead);
    if (best == 0 || cost < best_cost) best = columns, best_cost = cost;
  }
  return best;
}

template <class C>
cudaError_t Launch(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  SpmvPlan plan;
  plan.columns = static_cast<int32_t>(ChooseColumns<C>(geometry, device));
  const int64_t step =
      C::kThreads / (plan.columns / C::kLaneColumns) * C::kUnroll;  // windows that a block takes at once
  const int64_t row_bytes = std::min(kRowBudget, device.shared_bytes - C::SharedBytes(0));
  const int64_t budget = row_bytes / (4 * ew::kWindow * C::kTokens) / step * step;
  if (budget <= 0) return cudaErrorNotSupported;
  plan.chunk_windows = static_cast<int32_t>(std::min(CeilDiv(geometry.windows, step) * step, budget));
  const dim3 grid(static_cast<unsigned>(CeilDiv(geometry.out_features, plan.columns)), 1,
                  static_cast<unsigned>(geometry.batch));
  return ew::LaunchSplit(ew::SpmvKernel<C>, grid, C::kThreads, C::SharedBytes(plan.chunk_windows), stream, problem,
                         plan);
}

template <class Value, class Acc, int kQ, int kTokens, int kLaneColumns>
cudaError_t LaunchConfig(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  constexpr int kBytes = kQ * kLaneColumns * static_cast<int>(sizeof(Value));
  constexpr int kThreads = kTokens > 1 || kBytes > 32 ? 512 : 1024;  // 128 or 64 registers each
  constexpr int kUnroll = kBytes > 0 && kBytes < 16 ? 2 : 1;
  constexpr int kAhead = kQ == 0 ? 0 : 3;
  return Launch<SpmvConfig<Value, Acc, kQ, kTokens, kThreads, kUnroll, kLaneColumns, kAhead>>(problem, device, stream);
}

template <class Value, class Acc, int kQ>
cudaError_t LaunchTokens(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  constexpr int kBytes = kQ * static_cast<int>(sizeof(Value));
  if (geometry.tokens > 1) {
    constexpr int kFewQ = kQ == 4 || kQ == 8 || kQ == 16 ? kQ : 0;  // fewer constants here than for one token
    return geometry.tokens == 2 ? LaunchConfig<Value, Acc, kFewQ, 2, 1>(problem, device, stream)
                                : LaunchConfig<Value, Acc, kFewQ, 4, 1>(problem, device, stream);
  }
  // Short columns: two per thread, for wider loads.
  constexpr int kLaneColumns = kQ > 0 && kBytes <= 8 ? 2 : 1;
  return geometry.out_features % kLaneColumns == 0
             ? LaunchConfig<Value, Acc, kQ, 1, kLaneColumns>(problem, device, stream)
             : LaunchConfig<Value, Acc, kQ, 1, 1>(problem, device, stream);
}

template <class Value, class Acc>
cudaError_t LaunchQ(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
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
  ew::Device device;
  if (const cudaError_t error = ew::QueryDevice(&device); error != cudaSuccess) return error;
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
