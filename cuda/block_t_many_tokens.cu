// Launchers of block_t_many_tokens.cuh (vector-wise), block_t_units.cuh (block-wise) and spmm_t_expand.cuh (vector-wise
// of high density, element-wise): which problems they take, which tile runs.
//
// Memory order: problem.g is [batch, out_features, tokens] and the result [batch, in_features, tokens] (feature-major),
// although the shapes in problem.geometry are those of the row-major call.
#include <algorithm>

#include "cuda/block_t_many_tokens.cuh"
#include "cuda/block_t_units.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/spmm_t_expand.cuh"

namespace nmsparse::cuda {
namespace {

// What all kernels ask; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const Geometry& g = problem.geometry;
  const DType dtype = problem.g.dtype, result = problem.result.dtype;
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 31); };
  return (dtype == DType::kBF16 || dtype == DType::kF16) && problem.values.dtype == dtype &&
         (result == DType::kBF16 || result == DType::kF16 || result == DType::kF32) && g.window_units <= kMaskBits &&
         g.tokens % 8 == 0 && g.tokens > 0 && fits(g.tokens) && fits(g.windows * g.rows_per_window()) &&
         fits(g.out_blocks * g.bn) && fits(g.batch) && IsAligned(problem.g.data) && IsAligned(problem.values.data) &&
         IsAligned(problem.result.data);
}

constexpr uint64_t kBytes = 2;  // of an element

// Boxes of 64 columns of g, 64 tokens.
cudaError_t EncodeTokens(const Problem& problem, CUtensorMap* map) {
  const Geometry& g = problem.geometry;
  return EncodeTensorMap(TokensMap(problem.g.data, problem.g.dtype, g, g.out_features, kChunk), map);
}

template <class C>
cudaError_t LaunchVectors(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  using namespace block_t;  // NOLINT(build/namespaces)
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.geometry = g;
  a.mask = problem.mask;
  a.result = problem.result;
  a.chunks = g.bn / kChunk;
  a.slots = std::min(kMaxSlots, (kHopperSharedBytes - C::kFixedBytes) / C::kStageBytes);
  a.token_tiles = static_cast<int32_t>(CeilDiv(g.tokens, kTokens));
  a.window_tiles = static_cast<int32_t>(CeilDiv(g.windows, kWindows));
  const int64_t tiles = g.batch * a.token_tiles * a.window_tiles;
  if (tiles > kMaxBlocks) return cudaErrorNotSupported;
  a.tiles = static_cast<int32_t>(tiles);
  const uint64_t line = g.bn * kBytes, list = g.q * line, window = list * g.out_blocks;
  // Windows before ranks: a box lies in shared memory rank by rank.
  const TensorMapSpec values{
      MapType(problem.values.dtype),
      problem.values.data,
      5,
      {uint64_t(g.bn), uint64_t(g.windows), uint64_t(g.q), uint64_t(g.out_blocks), uint64_t(g.batch)},
      {window, line, list, window * g.windows},
      {kChunk, kWindows, uint32_t(g.q), 1, 1}};
  cudaError_t error = EncodeTensorMap(values, &a.values);
  if (error == cudaSuccess) error = EncodeTokens(problem, &a.g);
  if (error != cudaSuccess) return error;
  const int bytes = a.slots * C::kStageBytes + C::kFixedBytes;
  return LaunchInClusters(ManyTokensT<C>, std::min(a.tiles, multiprocessors), kThreads, bytes, 1, stream, a);
}

template <class C>
cudaError_t LaunchUnits(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  using namespace block_t_units;  // NOLINT(build/namespaces)
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.geometry = g;
  a.mask = problem.mask;
  a.result = problem.result;
  a.chunks = g.bn / kChunk;
  a.slots = std::min(kMaxSlots, (kHopperSharedBytes - C::kFixedBytes) / C::kStageBytes);
  a.token_tiles = static_cast<int32_t>(CeilDiv(g.tokens, C::kTokens));
  a.row_tiles = static_cast<int32_t>(CeilDiv(g.in_features, C::kRows));
  const int64_t tiles = g.batch * a.token_tiles * a.row_tiles;
  if (tiles > kMaxBlocks) return cudaErrorNotSupported;
  a.tiles = static_cast<int32_t>(tiles);
  const uint64_t line = g.bn * kBytes, list = uint64_t(g.q) * g.bk * line, window = list * g.out_blocks;
  const TensorMapSpec values{
      MapType(problem.values.dtype),
      problem.values.data,
      5,
      {uint64_t(g.bn), uint64_t(g.q) * g.bk, uint64_t(g.out_blocks), uint64_t(g.windows), uint64_t(g.batch)},
      {line, list, window, window * g.windows},
      {kChunk, C::kRows, 1, 1, 1}};
  cudaError_t error = EncodeTensorMap(values, &a.values);
  if (error == cudaSuccess) error = EncodeTokens(problem, &a.g);
  if (error != cudaSuccess) return error;
  const int bytes = a.slots * C::kStageBytes + C::kFixedBytes;
  return LaunchInClusters(ManyTokensUnits<C>, std::min(a.tiles, multiprocessors), kThreads, bytes, 1, stream, a);
}

template <template <class> class Weights, class T>
cudaError_t LaunchExpanded(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  using namespace spmm_t_expand;  // NOLINT(build/namespaces)
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.geometry = g;
  a.values_data = problem.values.data;
  a.g_data = problem.g.data;
  a.mask = problem.mask;
  a.result = problem.result;
  a.steps = static_cast<int32_t>(CeilDiv(g.out_blocks * g.bn, kChunk));
  a.chunks = std::max(g.bn / kChunk, 1);
  constexpr int kSwizzle = 1024;  // bytes that stages start at multiples of
  a.stage_bytes =
      kTokenChunks * kChunkBytes + static_cast<int>(CeilDiv(Weights<T>::StageBytes(g), kSwizzle)) * kSwizzle;
  a.slots = std::min(kMaxSlots, (kHopperSharedBytes - kFixedBytes) / a.stage_bytes);
  a.token_tiles = static_cast<int32_t>(CeilDiv(g.tokens, kTokens));
  a.window_tiles = static_cast<int32_t>(CeilDiv(g.windows, kWindows));
  const int64_t tiles = g.batch * a.token_tiles * a.window_tiles;
  if (tiles > kMaxBlocks) return cudaErrorNotSupported;
  a.tiles = static_cast<int32_t>(tiles);
  cudaError_t error = EncodeTokens(problem, &a.g);
  if (error == cudaSuccess && g.bn > 1) {
    const uint64_t line = g.bn * kBytes, list = g.q * line, window = list * g.out_blocks;
    const TensorMapSpec values{
        MapType(problem.values.dtype),
        problem.values.data,
        5,
        {uint64_t(g.bn), uint64_t(g.q), uint64_t(g.out_blocks), uint64_t(g.windows), uint64_t(g.batch)},
        {line, list, window, window * g.windows},
        {kChunk, uint32_t(g.q), 1, kWindows, 1}};
    error = EncodeTensorMap(values, &a.values);
  }
  if (error != cudaSuccess) return error;
  const int bytes = a.slots * a.stage_bytes + kFixedBytes;
  return LaunchInClusters(ManyTokensExpanded<Weights, T>, std::min(a.tiles, multiprocessors), kThreads, bytes, 1,
                          stream, a);
}

template <class T>
cudaError_t LaunchBlocks(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (g.bk % 128 == 0) return LaunchUnits<block_t_units::Config<T, 128>>(problem, multiprocessors, stream);
  if (g.bk % kChunk == 0) return LaunchUnits<block_t_units::Config<T, 64>>(problem, multiprocessors, stream);
  if (g.q <= 4) return LaunchVectors<block_t::Config<T, 32>>(problem, multiprocessors, stream);
  if (g.q <= 8) return LaunchVectors<block_t::Config<T, 64>>(problem, multiprocessors, stream);
  return LaunchExpanded<spmm_t_expand::VectorWeights, T>(problem, multiprocessors, stream);
}

template <class T>
cudaError_t LaunchElements(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  return LaunchExpanded<spmm_t_expand::ElementWeights, T>(problem, multiprocessors, stream);
}

using LaunchFor = cudaError_t (*)(const Problem&, int, cudaStream_t);

cudaError_t LaunchOnHopper(const Problem& problem, LaunchFor bf16, LaunchFor f16, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Device device;
  const cudaError_t error = QueryHopper(&device);
  if (error != cudaSuccess) return error;
  if (g.batch == 0 || g.in_features == 0 || g.out_blocks == 0) return cudaSuccess;
  return (problem.g.dtype == DType::kBF16 ? bf16 : f16)(problem, device.multiprocessors, stream);
}

}  // namespace

cudaError_t BlockWgmmaSpmmT(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (!Supports(problem) || (g.bk != 1 && g.bk % kChunk != 0) || g.bn % kChunk != 0) return cudaErrorNotSupported;
  return LaunchOnHopper(problem, LaunchBlocks<__nv_bfloat16>, LaunchBlocks<__half>, stream);
}

cudaError_t EwWgmmaSpmmT(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  // Values and mask words of a window start at multiples of 16 bytes where out_features is a multiple of 8.
  const bool elements =
      g.bk == 1 && g.bn == 1 && g.window_units == kMaskBits && g.out_features % 8 == 0 && IsAligned(problem.mask);
  if (!Supports(problem) || !elements) return cudaErrorNotSupported;
  return LaunchOnHopper(problem, LaunchElements<__nv_bfloat16>, LaunchElements<__half>, stream);
}

}  // namespace nmsparse::cuda
