// Launchers of sddmm_wgmma.cuh: which problems they take, how many blocks share a tile.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.g [batch, out_features, tokens] (feature-major),
// although the shapes in problem.geometry are those of the row-major call. The result is plain.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/sddmm_wgmma.cuh"

namespace nmsparse::cuda {
namespace sddmm {
namespace {

// What both kernels ask; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const Geometry& g = problem.geometry;
  const DType dtype = problem.x.dtype, result = problem.result.dtype;
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 31); };
  return (dtype == DType::kBF16 || dtype == DType::kF16) && problem.g.dtype == dtype &&
         (result == DType::kBF16 || result == DType::kF16 || result == DType::kF32) && g.tokens % 8 == 0 &&
         g.tokens > 0 && fits(g.tokens) && fits(g.windows * g.rows_per_window()) && fits(g.out_blocks * g.bn) &&
         fits(g.batch) && IsAligned(problem.x.data) && IsAligned(problem.g.data) && IsAligned(problem.result.data);
}

// Blocks that share the steps of a tile: as many as end soonest, where a tile of its own costs about four steps more
// than the products, and sharing about six.
int Splits(const Arguments& a, int multiprocessors) {
  int best = 1;
  double least = 0;
  for (int splits = 1; splits <= std::min(kMaxSplits, a.steps); splits *= 2) {
    const int64_t rounds = CeilDiv(int64_t{a.tiles} * splits, multiprocessors);
    if (splits > 1 && rounds > 1) break;
    const double steps = rounds * (static_cast<double>(CeilDiv(a.steps, splits)) + 4) + (splits > 1 ? 6 : 0);
    if (splits == 1 || steps < least) {
      best = splits;
      least = steps;
    }
  }
  return best;
}

template <class C>
cudaError_t LaunchTiles(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.geometry = g;
  a.x_data = problem.x.data;
  a.mask = problem.mask;
  a.result = problem.result;
  a.kept = g.q * g.bk;
  a.all_rows = static_cast<int32_t>(g.windows * (C::kRowsOf == Rows::kKept ? a.kept : g.rows_per_window()));
  a.row_tiles = static_cast<int32_t>(CeilDiv(a.all_rows, C::kRows));
  a.column_tiles = static_cast<int32_t>(CeilDiv(g.out_blocks * g.bn, C::kColumns));
  const int64_t tiles = g.batch * a.row_tiles * a.column_tiles;
  if (tiles * kMaxSplits > kMaxBlocks) return cudaErrorNotSupported;
  a.tiles = static_cast<int32_t>(tiles);
  a.steps = static_cast<int32_t>(CeilDiv(g.tokens, kChunk));
  a.slots = std::min(kMaxSlots, (kHopperSharedBytes - C::kFixedBytes) / C::kStageBytes);
  a.splits = Splits(a, multiprocessors);
  cudaError_t error = EncodeTensorMap(TokensMap(problem.g.data, problem.g.dtype, g, g.out_features, C::kColumns), &a.g);
  if (error == cudaSuccess && C::kRowsOf == Rows::kAll) {
    error = EncodeTensorMap(TokensMap(problem.x.data, problem.x.dtype, g, g.in_features, kMmaColumns), &a.x);
  }
  if (error != cudaSuccess) return error;
  const int bytes = a.slots * C::kStageBytes + C::kFixedBytes;
  const int clusters = a.splits > 1 ? a.tiles : std::min(a.tiles, multiprocessors);
  return LaunchInClusters(ManyTokens<C>, dim3(clusters * a.splits), kThreads, bytes, a.splits, stream, a);
}

template <template <class> class Launcher>
cudaError_t Launch(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Device device;
  const cudaError_t error = QueryHopper(&device);
  if (error != cudaSuccess) return error;
  if (g.batch == 0 || g.windows == 0 || g.out_features == 0) return cudaSuccess;
  return problem.x.dtype == DType::kBF16 ? Launcher<__nv_bfloat16>::Run(problem, device.multiprocessors, stream)
                                         : Launcher<__half>::Run(problem, device.multiprocessors, stream);
}

template <class T>
struct Blocks {
  static cudaError_t Run(const Problem& problem, int multiprocessors, cudaStream_t stream) {
    return problem.geometry.bn % 128 == 0 ? LaunchTiles<Config<T, Rows::kKept, 128>>(problem, multiprocessors, stream)
                                          : LaunchTiles<Config<T, Rows::kKept, 64>>(problem, multiprocessors, stream);
  }
};

template <class T>
struct Elements {
  static cudaError_t Run(const Problem& problem, int multiprocessors, cudaStream_t stream) {
    return LaunchTiles<Config<T, Rows::kAll, 128>>(problem, multiprocessors, stream);
  }
};

}  // namespace
}  // namespace sddmm

cudaError_t BlockWgmmaSddmm(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (!sddmm::Supports(problem) || g.window_units > kMaskBits || g.bn % kChunk != 0) return cudaErrorNotSupported;
  return sddmm::Launch<sddmm::Blocks>(problem, stream);
}

cudaError_t EwWgmmaSddmm(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (!sddmm::Supports(problem) || g.window_units != kMaskBits || g.bk != 1 || g.bn != 1) return cudaErrorNotSupported;
  return sddmm::Launch<sddmm::Elements>(problem, stream);
}

}  // namespace nmsparse::cuda
