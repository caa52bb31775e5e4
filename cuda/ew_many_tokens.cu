// Launchers of ew_many_tokens.cuh: which problems they take, which tile runs.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.result [batch, out_features, tokens]
// (feature-major), although the shapes in problem.geometry are those of the row-major call.
#include <algorithm>

#include "cuda/ew_many_tokens.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace ew {
namespace {

constexpr int kTokenGroup = 8;  // token tiles that walk the columns together
constexpr int kWindowRows = 32;

// What both forms can be asked for; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const Geometry& g = problem.geometry;
  const DType dtype = problem.values.dtype;
  const DType result = problem.result.dtype;
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 30); };
  return (dtype == DType::kBF16 || dtype == DType::kF16) && problem.x.dtype == dtype &&
         (result == DType::kBF16 || result == DType::kF16 || result == DType::kF32) && g.bk == 1 && g.bn == 1 &&
         g.window_units == kWindowRows && g.tokens % 8 == 0 && g.in_features > 0 && fits(g.tokens) &&
         fits(g.batch * g.windows * kWindowRows) && fits(g.out_features) && IsAligned(problem.x.data) &&
         IsAligned(problem.values.data) && IsAligned(problem.result.data);
}

TensorMapSpec ValuesMap(const Problem& problem, int out, int windows) {
  const Geometry& g = problem.geometry;
  const uint64_t column = g.q * 2, window = column * g.out_features;
  return {MapType(problem.values.dtype),
          problem.values.data,
          4,
          {uint64_t(g.q), uint64_t(g.out_features), uint64_t(g.windows), uint64_t(g.batch)},
          {column, window, window * g.windows},
          {uint32_t(g.q), uint32_t(out), uint32_t(windows), 1},
          CU_TENSOR_MAP_SWIZZLE_32B};
}

// x in the order of lines that kExpanded wants: row 8 t + 4 i + 2 h + e of a window is line 16 i + 8 h + 2 t + e.
TensorMapSpec PermutedTokensMap(const Problem& problem, int windows) {
  const Geometry& g = problem.geometry;
  const uint64_t row = g.tokens * 2;
  return {MapType(problem.x.dtype),
          problem.x.data,
          5,
          {uint64_t(g.tokens), 2, 4, 4, uint64_t(g.batch) * g.windows},
          {row, 8 * row, 2 * row, kWindowRows * row},
          {kChunk, 2, 4, 4, uint32_t(windows)}};
}

template <class C>
cudaError_t LaunchTiles(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  ManyArguments a{};
  a.values_data = problem.values.data;
  a.mask = problem.mask;
  a.output.geometry = g;
  a.output.epilogue = problem.epilogue;
  a.output.result = problem.result;
  a.steps = static_cast<int32_t>(CeilDiv(g.windows, C::kWindows));
  a.slots = std::min<int>(C::kMaxSlots, (kHopperSharedBytes - C::kFixedBytes) / C::StageBytes(g.q));
  if (!OrderTiles(g, C::kClusterOut, C::kTokens, kTokenGroup, &a.order)) return cudaErrorNotSupported;
  cudaError_t error = cudaSuccess;
  if (C::kForm == Form::kSparse24) {
    error = EncodeTensorMap(ValuesMap(problem, C::kOut, C::kWindows), &a.values);
    if (error == cudaSuccess) {
      error = EncodeTensorMap(TokensMap(problem.x.data, problem.x.dtype, g, g.in_features, C::kLines), &a.x);
    }
  } else {
    error = EncodeTensorMap(PermutedTokensMap(problem, C::kWindows), &a.x);
  }
  if (error == cudaSuccess && problem.result.dtype != DType::kF32) {
    error =
        EncodeTensorMap(TokensMap(problem.result.data, problem.result.dtype, g, g.out_features, kMmaRows), &a.output.y);
  }
  if (error != cudaSuccess) return error;
  const int bytes = a.slots * C::StageBytes(g.q) + C::kFixedBytes;
  const int clusters = std::min(a.order.tiles, multiprocessors / C::kCluster);
  return LaunchInClusters(ManyTokens<C>, C::kCluster * clusters, C::kThreads, bytes, C::kCluster, stream, a);
}

// The wide tile unless twice as many narrow ones fill the multiprocessors so much better that they end earlier.
template <class T, Form kForm>
cudaError_t LaunchForm(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Device device;
  const cudaError_t error = QueryHopper(&device);
  if (error != cudaSuccess) return error;
  if (IsEmpty(g)) return cudaSuccess;
  const int multiprocessors = device.multiprocessors;
  const auto rounds = [&](int tokens) {
    return CeilDiv(g.batch * CeilDiv(g.out_features, 256) * CeilDiv(g.tokens, tokens), multiprocessors / 2);
  };
  constexpr double kNarrow = 0.65;  // time of a narrow tile over that of a wide one (measured)
  return static_cast<double>(rounds(256)) <= kNarrow * static_cast<double>(rounds(128))
             ? LaunchTiles<ManyConfig<T, 256, kForm>>(problem, multiprocessors, stream)
             : LaunchTiles<ManyConfig<T, 128, kForm>>(problem, multiprocessors, stream);
}

template <Form kForm>
cudaError_t LaunchAny(const Problem& problem, cudaStream_t stream) {
  return problem.values.dtype == DType::kBF16 ? LaunchForm<__nv_bfloat16, kForm>(problem, stream)
                                              : LaunchForm<__half, kForm>(problem, stream);
}

}  // namespace
}  // namespace ew

cudaError_t EwWgmmaSparse24(const Problem& problem, cudaStream_t stream) {
  if (!ew::Supports(problem) || problem.geometry.q != 16) return cudaErrorNotSupported;
  return ew::LaunchAny<ew::Form::kSparse24>(problem, stream);
}

cudaError_t EwWgmma(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  // x in whole windows (in whole stages, where another batch entry follows), and the values of a window in whole pieces
  // of 16 bytes.
  const int rows = g.batch == 1 ? ew::kWindowRows : 2 * ew::kWindowRows;
  if (!ew::Supports(problem) || g.in_features % rows != 0 || g.q * g.out_features % 8 != 0) {
    return cudaErrorNotSupported;
  }
  return ew::LaunchAny<ew::Form::kExpanded>(problem, stream);
}

}  // namespace nmsparse::cuda
