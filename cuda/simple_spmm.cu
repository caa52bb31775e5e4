// y [tokens, out_features] = act((x W) * scales + bias), every pattern, shape and dtype. simple.cuh states the tiled
// product that serves many tokens; the few-token kernel below walks kept rows only.
//
// Few tokens: a block owns 32 columns and up to 8 tokens; lane = column, and the 16 warps take the row tiles of W in
// turn. A warp stages the tile's 32 rows of x in its own part of shared memory ([tokens][32]: a row is a bank, so lanes
// that keep different rows read different banks and lanes that keep the same row share one read), then every lane walks
// its kept rows. The 16 partial sums are added in warp order.
// Shared memory: 16 warps x kTokens x 32 words = 16,384 bytes for 8 tokens; staging first, partial sums at the end.
#include "cuda/kernels.h"
#include "cuda/simple.cuh"

namespace nmsparse::cuda {
namespace simple {
namespace {

template <class Acc>
class SpmmTile {
 public:
  using Accumulator = Acc;

  __host__ __device__ static int64_t Tiles(const Problem& problem) {
    const Geometry& geometry = problem.geometry;
    return geometry.batch * CeilDiv(geometry.tokens, kTile) * CeilDiv(geometry.out_features, kTile);
  }

  __device__ SpmmTile(const Problem& problem, int64_t tile) : problem_(problem) {
    const Geometry& geometry = problem.geometry;
    const int64_t token_tiles = CeilDiv(geometry.tokens, kTile);
    const int64_t column_tiles = CeilDiv(geometry.out_features, kTile);
    token_ = tile % token_tiles * kTile;
    column_ = tile / token_tiles % column_tiles * kTile;
    batch_ = tile / token_tiles / column_tiles;
    lane_ = threadIdx.x % kTile;
    depth_ = threadIdx.x / kTile * kRun;
    const int64_t column = min(column_ + lane_, geometry.out_features - 1);
    block_ = batch_ * geometry.windows * geometry.out_blocks + column / geometry.bn;
    column_in_block_ = static_cast<int32_t>(column % geometry.bn);
  }

  __device__ int32_t Steps() const { return static_cast<int32_t>(RowTiles(problem_.geometry)); }
  __device__ int Depth(int32_t step) const { return RowTileAt(problem_.geometry, step).rows; }

  __device__ bool LoadA(int32_t step, Acc (&run)[kRun]) const {
    const Geometry& geometry = problem_.geometry;
    const RowTile rows = RowTileAt(geometry, step);
    const int64_t token = token_ + lane_;
    const int count = token < geometry.tokens ? rows.rows - depth_ : 0;
    LoadActivations(problem_.x, (batch_ * geometry.tokens + token) * geometry.in_features + rows.k + depth_, count,
                    run);
    return AllFinite(run);
  }

  __device__ void LoadB(int32_t step, Acc (&run)[kRun]) const {
    const Geometry& geometry = problem_.geometry;
    const RowTile rows = RowTileAt(geometry, step);
    const int64_t block = block_ + rows.window * geometry.out_blocks;
    KeptRows kept = FindKeptRows(geometry, problem_.mask + block * geometry.mask_words, rows.first_row);
    if (rows.rows < kDepth) kept.bits &= (1u << rows.rows) - 1;
    const int32_t skipped = __popc(kept.bits & ((1u << depth_) - 1));
    const int64_t list = block * geometry.q * geometry.bk + kept.first + skipped;
    LoadColumn(problem_.values, list * geometry.bn + column_in_block_, geometry.bn, kept.bits >> depth_, run);
  }

  __device__ void StoreA(Acc (&tile)[kDepth][kStride], const Acc (&run)[kRun]) const {
    StoreDown(tile, depth_, lane_, run);
  }
  __device__ void StoreB(Acc (&tile)[kDepth][kStride], const Acc (&run)[kRun]) const {
    StoreDown(tile, depth_, lane_, run);
  }

  __device__ void Emit(const Acc (&out)[kTile][kStride]) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t column = column_ + lane_;
    if (column >= geometry.out_features) return;
    const int rows = static_cast<int>(min(int64_t{kTile}, geometry.tokens - token_));
#pragma unroll 1
    for (int row = threadIdx.x / kTile; row < rows; row += kThreads / kTile) {
      const int64_t index = (batch_ * geometry.tokens + token_ + row) * geometry.out_features + column;
      StoreWithEpilogue(problem_, index, batch_ * geometry.out_features + column, out[row][lane_]);
    }
  }

 private:
  const Problem& problem_;
  int64_t token_, column_, batch_;
  int64_t block_;  // of this thread's column, in window 0
  int32_t column_in_block_;
  int lane_, depth_;
};

constexpr int kWarps = 16;
constexpr int kGather = 8;  // values of a lane in flight

template <class Acc, int kTokens>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1) FewTokensSpmm(const __grid_constant__ Problem problem) {
  __shared__ Acc shared[kWarps][kTokens][kWarpSize];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t token_tiles = CeilDiv(geometry.tokens, kTokens);
  const int64_t column_tiles = CeilDiv(geometry.out_features, kWarpSize);
  const int32_t row_tiles = static_cast<int32_t>(RowTiles(geometry));
  Acc(&x)[kTokens][kWarpSize] = shared[warp];

  for (int64_t tile = blockIdx.x; tile < geometry.batch * token_tiles * column_tiles; tile += gridDim.x) {
    const int64_t token = tile % token_tiles * kTokens;
    const int64_t column = tile / token_tiles % column_tiles * kWarpSize + lane;
    const int64_t batch = tile / token_tiles / column_tiles;
    const int64_t row_of_x = batch * geometry.tokens + token;
    const int tokens = static_cast<int>(min(int64_t{kTokens}, geometry.tokens - token));
    const int64_t stored_column = min(column, geometry.out_features - 1);
    const int64_t first_block = batch * geometry.windows * geometry.out_blocks + stored_column / geometry.bn;
    const int32_t column_in_block = static_cast<int32_t>(stored_column % geometry.bn);
    Acc sum[kTokens] = {};

    for (int32_t row_tile = warp; row_tile < row_tiles; row_tile += kWarps) {
      const RowTile rows = RowTileAt(geometry, row_tile);
      const int64_t block = first_block + rows.window * geometry.out_blocks;
      KeptRows kept = FindKeptRows(geometry, problem.mask + block * geometry.mask_words, rows.first_row);
      if (rows.rows < kMaskBits) kept.bits &= (1u << rows.rows) - 1;
      __syncwarp();  // the last tile's rows of x have been read
      WithInputType<Acc>(problem.x.dtype, [&](auto zero) {
        const auto* source = static_cast<const decltype(zero)*>(problem.x.data) + rows.k + lane;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const bool inside = t < tokens && lane < rows.rows;
          x[t][lane] = inside ? ToAccumulator<Acc>(source[(row_of_x + t) * geometry.in_features]) : Acc(0);
        }
      });
      __syncwarp();
      WithInputType<Acc>(problem.values.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* list = static_cast<const T*>(problem.values.data) +
                        (block * geometry.q * geometry.bk + kept.first) * geometry.bn + column_in_block;
        for (uint32_t bits = kept.bits; bits != 0;) {
          const int count = __popc(bits);
          T gathered[kGather];
#pragma unroll
          for (int i = 0; i < kGather; ++i) {
            if (i < count) gathered[i] = list[int64_t{i} * geometry.bn];
          }
#pragma unroll
          for (int i = 0; i < kGather; ++i) {
            if (i >= count) break;
            const int row = __ffs(bits) - 1;
            bits &= bits - 1;
            const Acc value = ToAccumulator<Acc>(gathered[i]);
#pragma unroll
            for (int t = 0; t < kTokens; ++t) sum[t] += value * x[t][row];
          }
          list += int64_t{kGather} * geometry.bn;
        }
      });
    }

    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTokens; ++t) x[t][lane] = sum[t];
    __syncthreads();
    if (warp < tokens && column < geometry.out_features) {
      Acc total = Acc(0);
      for (int w = 0; w < kWarps; ++w) total += shared[w][warp][lane];
      StoreWithEpilogue(problem, (row_of_x + warp) * geometry.out_features + column,
                        batch * geometry.out_features + column, total);
    }
    __syncthreads();
  }
}

template <class Acc, int kTokens>
cudaError_t LaunchFewTokens(const Problem& problem, cudaStream_t stream) {
  static_assert(kTokens <= kWarps, "a warp adds up and stores one token");
  const Geometry& geometry = problem.geometry;
  const int64_t tiles = geometry.batch * CeilDiv(geometry.tokens, kTokens) * CeilDiv(geometry.out_features, kWarpSize);
  return LaunchTiles(FewTokensSpmm<Acc, kTokens>, problem, tiles, dim3(kWarps * kWarpSize), 0, stream);
}

template <class Acc>
cudaError_t Launch(const Problem& problem, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  if (tokens == 1) return LaunchFewTokens<Acc, 1>(problem, stream);
  if (tokens <= kFewTokens) return LaunchFewTokens<Acc, 8>(problem, stream);
  return LaunchTiledProduct<SpmmTile<Acc>>(problem, stream);
}

}  // namespace
}  // namespace simple

cudaError_t SimpleSpmm(const Problem& problem, cudaStream_t stream) {
  if (!simple::FitsIn32Bits(problem.geometry)) return cudaErrorNotSupported;
  if (problem.x.dtype == DType::kS8 && problem.values.dtype == DType::kS8) {
    return simple::Launch<int32_t>(problem, stream);
  }
  return simple::Launch<float>(problem, stream);
}

}  // namespace nmsparse::cuda
