// Launcher of block_fma.cuh: which problems it takes, which tile runs.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.result [batch, out_features, tokens]
// (feature-major), although the shapes in problem.geometry are those of the row-major call.
#include "cuda/block_fma.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace block_fma {
namespace {

// What the kernel can be asked for; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const Geometry& g = problem.geometry;
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 31); };
  return problem.x.dtype == DType::kF32 && problem.values.dtype == DType::kF32 && problem.result.dtype == DType::kF32 &&
         g.window_units <= kMaskBits && g.bn % kWarpColumns == 0 && g.tokens % 4 == 0 && fits(g.tokens) &&
         fits(g.windows * g.rows_per_window()) && fits(g.windows * g.out_blocks * g.q * g.bk) &&
         fits(g.out_blocks * g.bn) && fits(g.batch) && IsAligned(problem.x.data) && IsAligned(problem.values.data) &&
         IsAligned(problem.result.data);
}

template <class C>
cudaError_t LaunchTiles(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.geometry = g;
  a.x = static_cast<const float*>(problem.x.data);
  a.values = static_cast<const float*>(problem.values.data);
  a.mask = problem.mask;
  a.epilogue = problem.epilogue;
  a.y = static_cast<float*>(problem.result.data);
  a.kept = g.q * g.bk;
  a.all_kept = static_cast<int32_t>(g.windows * a.kept);
  a.column_tiles = static_cast<int32_t>(CeilDiv(g.out_features, C::kColumns));
  a.token_tiles = static_cast<int32_t>(CeilDiv(g.tokens, C::kTokens));
  a.token_group = 8;
  const int64_t tiles = g.batch * a.column_tiles * a.token_tiles;
  if (tiles > kMaxBlocks) return cudaErrorNotSupported;
  return LaunchInClusters(ManyTokensFma<C>, static_cast<unsigned>(tiles), kThreads, C::kSharedBytes, 1, stream, a);
}

}  // namespace
}  // namespace block_fma

cudaError_t BlockFmaSpmm(const Problem& problem, cudaStream_t stream) {
  using namespace block_fma;  // NOLINT(build/namespaces)
  const Geometry& g = problem.geometry;
  if (!Supports(problem)) return cudaErrorNotSupported;
  if (IsEmpty(g)) return cudaSuccess;
  if (g.bn % 128 == 0) return LaunchTiles<Config<128, 128, 4>>(problem, stream);
  if (g.bn % 64 == 0) return LaunchTiles<Config<64, 256, 4>>(problem, stream);
  return LaunchTiles<Config<32, 512, 3>>(problem, stream);
}

}  // namespace nmsparse::cuda
