// dv [windows, out_blocks, q, bk, bn] = (xᵀ g) at the kept units, every pattern, shape and dtype. The tiled product of
// simple.cuh makes 64 rows (two row tiles) by 64 columns of xᵀ g; each thread then walks the kept rows of one column of
// one row tile and writes them where the column's list has them.
//
// Rows beyond in_features and columns beyond out_features get zero, as does what a corrupt mask with too few bits
// leaves of a list: its last row tile writes that.
#include "cuda/kernels.h"
#include "cuda/simple.cuh"

namespace nmsparse::cuda {
namespace simple {
namespace {

class SddmmTile {
 public:
  using Accumulator = float;

  __host__ __device__ static int64_t Tiles(const Problem& problem) {
    const Geometry& geometry = problem.geometry;
    return geometry.batch * CeilDiv(RowTiles(geometry), 2) * CeilDiv(geometry.out_blocks * geometry.bn, kTile);
  }

  __device__ SddmmTile(const Problem& problem, int64_t tile) : problem_(problem) {
    const Geometry& geometry = problem.geometry;
    const int64_t pairs = CeilDiv(RowTiles(geometry), 2);
    const int64_t column_tiles = CeilDiv(geometry.out_blocks * geometry.bn, kTile);
    first_row_tile_ = static_cast<int32_t>(tile % pairs * 2);
    column_ = static_cast<int32_t>(tile / pairs % column_tiles * kTile);
    batch_ = tile / pairs / column_tiles;
    depth_ = threadIdx.x / kThreadsPerToken;
    first_ = threadIdx.x % kThreadsPerToken * kRun;
  }

  __device__ int32_t Steps() const { return static_cast<int32_t>(CeilDiv(problem_.geometry.tokens, kDepth)); }
  __device__ int Depth(int32_t step) const {
    return static_cast<int>(min(int64_t{kDepth}, problem_.geometry.tokens - int64_t{step} * kDepth));
  }

  // x: four threads per token, 16 rows of W each. Always "finite": b holds no absent weights here.
  __device__ bool LoadA(int32_t step, float (&run)[kRun]) const {
    const Geometry& geometry = problem_.geometry;
    const int32_t row_tile = first_row_tile_ + first_ / kDepth;
    int count = 0;
    int64_t k = 0;
    if (depth_ < Depth(step) && row_tile < RowTiles(geometry)) {
      const RowTile rows = RowTileAt(geometry, row_tile);
      count = rows.rows - first_ % kDepth;
      k = rows.k + first_ % kDepth;
    }
    LoadActivations(problem_.x, Token(step) * geometry.in_features + k, count, run);
    return true;
  }

  // g: four threads per token, 16 columns each.
  __device__ void LoadB(int32_t step, float (&run)[kRun]) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t column = int64_t{column_} + first_;
    const int count = depth_ < Depth(step) ? static_cast<int>(min(int64_t{kRun}, geometry.out_features - column)) : 0;
    LoadActivations(problem_.g, Token(step) * geometry.out_features + column, count, run);
  }

  __device__ void StoreA(float (&tile)[kDepth][kStride], const float (&run)[kRun]) const {
    StoreAcross(tile, depth_, first_, run);
  }
  __device__ void StoreB(float (&tile)[kDepth][kStride], const float (&run)[kRun]) const {
    StoreAcross(tile, depth_, first_, run);
  }

  __device__ void Emit(const float (&out)[kTile][kStride]) const {
    const Geometry& geometry = problem_.geometry;
    const int lane = threadIdx.x % kTile;
    const int first_row = threadIdx.x / kTile * kDepth;
    const int32_t column = column_ + lane;
    const int32_t row_tile = first_row_tile_ + first_row / kDepth;
    if (column >= geometry.out_blocks * geometry.bn || row_tile >= RowTiles(geometry)) return;
    const RowTile rows = RowTileAt(geometry, row_tile);
    const int64_t block = (batch_ * geometry.windows + rows.window) * geometry.out_blocks + column / geometry.bn;
    const KeptRows kept = FindKeptRows(geometry, problem_.mask + block * geometry.mask_words, rows.first_row);
    const int32_t list_length = geometry.q * geometry.bk;
    const bool last = rows.first_row + kDepth >= geometry.window_units * geometry.bk;
    const int valid_rows = column < geometry.out_features ? rows.rows : 0;
    WithOutputType(problem_.result.dtype, [&](auto zero) {
      using T = decltype(zero);
      T* list = static_cast<T*>(problem_.result.data) + block * list_length * geometry.bn + column % geometry.bn;
      int32_t j = kept.first;
#pragma unroll 1
      for (uint32_t bits = kept.bits; bits != 0; bits &= bits - 1, ++j) {
        const int row = __ffs(bits) - 1;
        list[int64_t{j} * geometry.bn] = To<T>(row < valid_rows ? out[first_row + row][lane] : 0.0f);
      }
#pragma unroll 1
      for (; last && j < list_length; ++j) list[int64_t{j} * geometry.bn] = To<T>(0.0f);
    });
  }

 private:
  static constexpr int kThreadsPerToken = kTile / kRun;
  static_assert(kThreads / kThreadsPerToken == kDepth, "the threads cover the step's tokens");

  __device__ int64_t Token(int32_t step) const {
    return batch_ * problem_.geometry.tokens + int64_t{step} * kDepth + depth_;
  }

  const Problem& problem_;
  int64_t batch_;
  int32_t first_row_tile_, column_;
  int depth_, first_;  // this thread's token in the step, its first row or column in the tile
};

}  // namespace
}  // namespace simple

cudaError_t SimpleSddmm(const Problem& problem, cudaStream_t stream) {
  using namespace simple;  // NOLINT(build/namespaces)
  if (!FitsIn32Bits(problem.geometry)) return cudaErrorNotSupported;
  return LaunchTiledProduct<SddmmTile>(problem, stream);
}

}  // namespace nmsparse::cuda
