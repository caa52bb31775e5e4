// Launchers of the element-wise tensor-core kernels for few tokens, windows of 32, bfloat16 or float16 x.
//
//   name               kernel            values                        q
//   "ew_few_tokens"    ew_bytes.cuh      x's dtype                     12, 16, 24; from 17 tokens on all
//                      ew_expand.cuh     x's dtype                     2, 3, 4, 6, 8
//                                        s8, f8e4m3fn                  8, 16
//   "ew_sparse24"      ew_sparse24.cuh   x's dtype                     16, as 2 of every 4 rows
//
// float16 has q of 4, 8 and 16 alone. Any in_features, out_features, batch. Several splits (clusters) need sm_90;
// before it there is one.
#include "cuda/ew_bytes.cuh"
#include "cuda/ew_expand.cuh"
#include "cuda/ew_sparse24.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

using ew::ByteConfig;
using ew::ExpandConfig;
using ew::Sparse24Config;

inline constexpr int64_t kMaxExpandTokens = 32;  // beyond, dense is faster by far
inline constexpr int64_t kMaxSparse24Tokens = 64;

bool InDomain(const Geometry& geometry, int64_t max_tokens) {
  return geometry.bk == 1 && geometry.bn == 1 && geometry.window_units == ew::kWindow && geometry.q >= 1 &&
         geometry.q < ew::kWindow && geometry.tokens <= max_tokens && geometry.batch <= 65535 &&
         geometry.windows <= ew::kMaxWindows;
}

// Divides the windows into shares of whole groups of four, so that the estimated time (in groups of one block) is
// least: the blocks that one multiprocessor runs share it, and each pays for the exchange of partial sums, which grows
// with the cluster.
template <class C>
cudaError_t Launch(void (*kernel)(Problem, int32_t), const Problem& problem, const Device& device,
                   cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (C::kSharedBytes > device.shared_bytes) return cudaErrorNotSupported;
  const int64_t groups = CeilDiv(geometry.windows, ew::kGroupWindows);
  const int64_t columns = CeilDiv(geometry.out_features, C::kColumns);
  int64_t best = 1;
  double best_cost = 0;
  for (int64_t splits = 1; splits <= device.max_splits() && splits <= groups; splits *= 2) {
    const int64_t blocks = CeilDiv(columns * geometry.batch * splits, device.multiprocessors);
    const double crowd = std::max(1.0, C::kCrowding * static_cast<double>(blocks));
    const double exchange = splits == 1 ? 1.0 : 3.0 + static_cast<double>(splits * C::kTokens) / 32;
    const double cost = crowd * (static_cast<double>(CeilDiv(groups, splits)) + exchange);
    if (splits == 1 || cost < best_cost) best = splits, best_cost = cost;
  }
  const int64_t share = CeilDiv(groups, best) * ew::kGroupWindows;
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(best), static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(kernel, grid, C::kThreads, C::kSharedBytes, dim3(1, grid.y), stream, problem,
                          static_cast<int32_t>(share));
}

// The cost of a byte per lane hardly depends on q, that of a window per lane falls with it.
template <class X, class Value, int kQ, int kTokens>
cudaError_t ExpandTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  if constexpr (std::is_same_v<X, Value> && (kQ > 8 || kTokens > 16)) {
    using C = ByteConfig<X, kQ, kTokens, 4, 2, kTokens <= 16 ? 4 : 3>;
    return Launch<C>(ew::ByteKernel<C>, problem, device, stream);
  } else {
    using C = ExpandConfig<X, Value, kQ, kTokens, kTokens <= 16 ? 4 : 8, kTokens <= 16 ? 5 : 2>;
    return Launch<C>(ew::ExpandKernel<C>, problem, device, stream);
  }
}

template <class X, class Value, int kQ>
cudaError_t Expand(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  if (tokens <= 8) return ExpandTokens<X, Value, kQ, 8>(problem, device, stream);
  if (tokens <= 16) return ExpandTokens<X, Value, kQ, 16>(problem, device, stream);
  return ExpandTokens<X, Value, kQ, 32>(problem, device, stream);
}

template <class X, class Value>
cudaError_t ExpandQ(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int32_t q = problem.geometry.q;
  if (q == 8) return Expand<X, Value, 8>(problem, device, stream);
  if (q == 16) return Expand<X, Value, 16>(problem, device, stream);
  if constexpr (std::is_same_v<X, Value>) {
    if (q == 4) return Expand<X, Value, 4>(problem, device, stream);
  }
  if constexpr (std::is_same_v<X, Value> && std::is_same_v<X, __nv_bfloat16>) {
    if (q == 2) return Expand<X, Value, 2>(problem, device, stream);
    if (q == 3) return Expand<X, Value, 3>(problem, device, stream);
    if (q == 6) return Expand<X, Value, 6>(problem, device, stream);
    if (q == 12) return Expand<X, Value, 12>(problem, device, stream);
    if (q == 24) return Expand<X, Value, 24>(problem, device, stream);
  }
  return cudaErrorNotSupported;
}

template <class X>
cudaError_t ExpandValues(const Problem& problem, const Device& device, cudaStream_t stream) {
  if (problem.values.dtype == problem.x.dtype) return ExpandQ<X, X>(problem, device, stream);
  if (problem.values.dtype == DType::kS8) return ExpandQ<X, int8_t>(problem, device, stream);
  if (problem.values.dtype == DType::kF8E4M3FN) return ExpandQ<X, E4M3>(problem, device, stream);
  return cudaErrorNotSupported;
}

template <class X, int kTokens, int kWarps, int kStages, int kMinBlocks>
cudaError_t Sparse24Tile(const Problem& problem, const Device& device, cudaStream_t stream) {
  using C = Sparse24Config<X, kTokens, kWarps, kStages, kMinBlocks>;
  return Launch<C>(ew::Sparse24Kernel<C>, problem, device, stream);
}

template <class X>
cudaError_t Sparse24(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const int64_t tokens = geometry.tokens;
  if (tokens > 32) return Sparse24Tile<X, 64, 8, 2, 1>(problem, device, stream);
  if (tokens > 16) return Sparse24Tile<X, 32, 8, 3, 1>(problem, device, stream);
  // Wide blocks stage x for more columns, narrow ones spread a small weight over all multiprocessors.
  const bool wide = 4 * CeilDiv(geometry.out_features, 256) * geometry.batch >= 3 * device.multiprocessors;
  if (tokens > 8) {
    return wide ? Sparse24Tile<X, 16, 8, 3, 1>(problem, device, stream)
                : Sparse24Tile<X, 16, 4, 3, 3>(problem, device, stream);
  }
  return wide ? Sparse24Tile<X, 8, 8, 3, 1>(problem, device, stream)
              : Sparse24Tile<X, 8, 4, 3, 3>(problem, device, stream);
}

}  // namespace

cudaError_t EwFewTokens(const Problem& problem, cudaStream_t stream) {
  if (!InDomain(problem.geometry, kMaxExpandTokens) || !ew::Aligned(problem)) return cudaErrorNotSupported;
  Device device;
  if (const cudaError_t error = QueryDevice(&device); error != cudaSuccess) return error;
  if (problem.x.dtype == DType::kBF16) return ExpandValues<__nv_bfloat16>(problem, device, stream);
  if (problem.x.dtype == DType::kF16) return ExpandValues<__half>(problem, device, stream);
  return cudaErrorNotSupported;
}

cudaError_t EwSparse24(const Problem& problem, cudaStream_t stream) {
  if (!InDomain(problem.geometry, kMaxSparse24Tokens) || !ew::Aligned(problem) || problem.geometry.q != 16 ||
      problem.values.dtype != problem.x.dtype) {
    return cudaErrorNotSupported;
  }
  Device device;
  if (const cudaError_t error = QueryDevice(&device); error != cudaSuccess) return error;
  if (problem.x.dtype == DType::kBF16) return Sparse24<__nv_bfloat16>(problem, device, stream);
  if (problem.x.dtype == DType::kF16) return Sparse24<__half>(problem, device, stream);
  return cudaErrorNotSupported;
}

}  // namespace nmsparse::cuda
