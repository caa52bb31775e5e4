// Launchers of the element-wise tensor-core kernels for few tokens (up to 64), windows of 32, bfloat16 or float16 x.
//
//   name               kernel            values                        q
//   "ew_few_tokens"    ew_expand.cuh     x's dtype                     2, 3, 4, 6, 8, 12, 16, 24
//                                        s8, f8e4m3fn                  4, 8, 16
//   "ew_sparse24"      ew_sparse24.cuh   x's dtype                     16, as 2 of every 4 rows
//
// Any in_features, out_features, batch. Several splits (clusters) need sm_90; before it there is one.
#include "cuda/ew_expand.cuh"
#include "cuda/ew_sparse24.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

using ew::ExpandConfig;
using ew::Sparse24Config;

inline constexpr int64_t kMaxTokens = 64;

bool InDomain(const Geometry& geometry) {
  return geometry.bk == 1 && geometry.bn == 1 && geometry.window_units == ew::kWindow && geometry.q >= 1 &&
         geometry.q < ew::kWindow && geometry.tokens <= kMaxTokens && geometry.batch <= 65535 &&
         geometry.windows <= ew::kMaxWindows;
}

// Shares of the windows, whole numbers of groups of four. The cost of a split: blocks of a wave share the device, so the
// time is the number of waves (of `resident` blocks) times a share, plus what a block costs whatever its share.
template <class C>
cudaError_t Launch(void (*kernel)(Problem, int32_t), const Problem& problem, const ew::Device& device,
                   cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (C::kSharedBytes > device.shared_bytes) return cudaErrorNotSupported;
  constexpr int64_t kBlockCost = 3;  // in groups of four windows: the first loads, the exchange of partial sums
  const int64_t groups = CeilDiv(geometry.windows, ew::kGroupWindows);
  const int64_t columns = CeilDiv(geometry.out_features, C::kColumns) * geometry.batch;
  const int64_t resident = int64_t{device.multiprocessors} * C::kMinBlocks;
  int64_t best = 1;
  double best_cost = 0;
  for (int64_t splits = 1; splits <= (device.major >= 9 ? ew::kMaxSplits : 1) && splits <= groups; splits *= 2) {
    // A wave that is not full leaves more of the memory's bandwidth to each block: count it by the larger of its share
    // of the multiprocessors and of the blocks.
    const double blocks = static_cast<double>(columns * splits);
    const double waves = std::max(blocks / static_cast<double>(resident),
                                  static_cast<double>(CeilDiv(columns * splits, device.multiprocessors)) /
                                      C::kMinBlocks);
    const double cost = waves * static_cast<double>(CeilDiv(groups, splits) + kBlockCost * (splits > 1 ? 2 : 1));
    if (splits == 1 || cost < best_cost) best = splits, best_cost = cost;
  }
  const int64_t share = CeilDiv(groups, best) * ew::kGroupWindows;
  const dim3 grid(static_cast<unsigned>(CeilDiv(geometry.out_features, C::kColumns)), static_cast<unsigned>(best),
                  static_cast<unsigned>(geometry.batch));
  return ew::LaunchSplit(kernel, grid, C::kThreads, C::kSharedBytes, stream, problem, static_cast<int32_t>(share));
}

template <class X, class Value, int kQ>
cudaError_t Expand(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  if (tokens <= 8) {
    using C = ExpandConfig<X, Value, kQ, 8, 8, 2, 3>;
    return Launch<C>(ew::ExpandKernel<C>, problem, device, stream);
  }
  if (tokens <= 16) {
    using C = ExpandConfig<X, Value, kQ, 16, 8, 2, 2>;
    return Launch<C>(ew::ExpandKernel<C>, problem, device, stream);
  }
  if (tokens <= 32) {
    using C = ExpandConfig<X, Value, kQ, 32, 8, 2, 2>;
    return Launch<C>(ew::ExpandKernel<C>, problem, device, stream);
  }
  using C = ExpandConfig<X, Value, kQ, 64, 8, 2, 2>;
  return Launch<C>(ew::ExpandKernel<C>, problem, device, stream);
}

template <class X, class Value>
cudaError_t ExpandQ(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  switch (problem.geometry.q) {
    case 4:
      return Expand<X, Value, 4>(problem, device, stream);
    case 8:
      return Expand<X, Value, 8>(problem, device, stream);
    case 16:
      return Expand<X, Value, 16>(problem, device, stream);
    default:
      break;
  }
  if constexpr (std::is_same_v<X, Value>) {
    switch (problem.geometry.q) {
      case 2:
        return Expand<X, Value, 2>(problem, device, stream);
      case 3:
        return Expand<X, Value, 3>(problem, device, stream);
      case 6:
        return Expand<X, Value, 6>(problem, device, stream);
      case 12:
        return Expand<X, Value, 12>(problem, device, stream);
      case 24:
        return Expand<X, Value, 24>(problem, device, stream);
      default:
        break;
    }
  }
  return cudaErrorNotSupported;
}

template <class X>
cudaError_t ExpandValues(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  if (problem.values.dtype == problem.x.dtype) return ExpandQ<X, X>(problem, device, stream);
  if (problem.values.dtype == DType::kS8) return ExpandQ<X, int8_t>(problem, device, stream);
  if (problem.values.dtype == DType::kF8E4M3FN) return ExpandQ<X, E4M3>(problem, device, stream);
  return cudaErrorNotSupported;
}

template <class X>
cudaError_t Sparse24(const Problem& problem, const ew::Device& device, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  if (tokens <= 8) {
    using C = Sparse24Config<X, 8, 4, 3, 3>;
    return Launch<C>(ew::Sparse24Kernel<C>, problem, device, stream);
  }
  if (tokens <= 16) {
    using C = Sparse24Config<X, 16, 4, 3, 3>;
    return Launch<C>(ew::Sparse24Kernel<C>, problem, device, stream);
  }
  if (tokens <= 32) {
    using C = Sparse24Config<X, 32, 8, 2, 2>;
    return Launch<C>(ew::Sparse24Kernel<C>, problem, device, stream);
  }
  using C = Sparse24Config<X, 64, 8, 2, 1>;
  return Launch<C>(ew::Sparse24Kernel<C>, problem, device, stream);
}

}  // namespace

cudaError_t EwFewTokens(const Problem& problem, cudaStream_t stream) {
  if (!InDomain(problem.geometry)) return cudaErrorNotSupported;
  ew::Device device;
  if (const cudaError_t error = ew::QueryDevice(&device); error != cudaSuccess) return error;
  if (problem.x.dtype == DType::kBF16) return ExpandValues<__nv_bfloat16>(problem, device, stream);
  if (problem.x.dtype == DType::kF16) return ExpandValues<__half>(problem, device, stream);
  return cudaErrorNotSupported;
}

cudaError_t EwSparse24(const Problem& problem, cudaStream_t stream) {
  if (!InDomain(problem.geometry) || problem.geometry.q != 16 || problem.values.dtype != problem.x.dtype) {
    return cudaErrorNotSupported;
  }
  ew::Device device;
  if (const cudaError_t error = ew::QueryDevice(&device); error != cudaSuccess) return error;
  if (problem.x.dtype == DType::kBF16) return Sparse24<__nv_bfloat16>(problem, device, stream);
  if (problem.x.dtype == DType::kF16) return Sparse24<__half>(problem, device, stream);
  return cudaErrorNotSupported;
}

}  // namespace nmsparse::cuda
