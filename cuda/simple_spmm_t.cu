// dx [tokens, in_features] = g Wᵀ, every pattern, shape and dtype. simple.cuh states the tiled product that serves many
// tokens; the few-token kernel below expands nothing.
//
// Few tokens: a block owns one row tile (32 rows of W, the columns of dx) and up to 8 tokens; lane = row, and the 16
// warps take groups of 32 columns of W in turn. For its group a warp first lets lane = column: each lane stages that
// column of g ([columns][tokens], so that a column's tokens are one or two 16-byte reads) and finds what the column
// keeps of the row tile. Then it walks the columns: bits and position come from the column's lane by shuffle, a lane
// whose row is kept reads its weight at its rank among the kept rows (neighbours in memory for element-wise weights),
// and adds weight * g. The 16 partial sums are added in warp order. Shared memory: 16 warps x 32 x kTokens words =
// 16,384 bytes for 8 tokens; staging first, partial sums at the end.
#include "cuda/kernels.h"
#include "cuda/simple.cuh"

namespace nmsparse::cuda {
namespace simple {
namespace {

class SpmmTTile {
 public:
  using Accumulator = float;

  __host__ __device__ static int64_t Tiles(const Problem& problem) {
    const Geometry& geometry = problem.geometry;
    return geometry.batch * CeilDiv(geometry.tokens, kTile) * CeilDiv(RowTiles(geometry), 2);
  }

  __device__ SpmmTTile(const Problem& problem, int64_t tile) : problem_(problem) {
    const Geometry& geometry = problem.geometry;
    const int64_t token_tiles = CeilDiv(geometry.tokens, kTile);
    const int64_t pairs = CeilDiv(RowTiles(geometry), 2);
    token_ = tile % token_tiles * kTile;
    first_row_tile_ = static_cast<int32_t>(tile / token_tiles % pairs * 2);
    batch_ = tile / token_tiles / pairs;
  }

  __device__ int32_t Steps() const { return static_cast<int32_t>(CeilDiv(problem_.geometry.out_features, kDepth)); }
  __device__ int Depth(int32_t step) const {
    return static_cast<int>(min(int64_t{kDepth}, problem_.geometry.out_features - int64_t{step} * kDepth));
  }

  // g: lane = token, 16 columns each.
  __device__ bool LoadA(int32_t step, float (&run)[kRun]) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t token = token_ + threadIdx.x % kTile;
    const int depth = threadIdx.x / kTile * kRun;
    const int count = token < geometry.tokens ? Depth(step) - depth : 0;
    const int64_t row = batch_ * geometry.tokens + token;
    LoadActivations(problem_.g, row * geometry.out_features + int64_t{step} * kDepth + depth, count, run);
    return AllFinite(run);
  }

  // W: lane = column, 16 rows each; the four warps are the halves of the two row tiles.
  __device__ void LoadB(int32_t step, float (&run)[kRun]) const {
    const Geometry& geometry = problem_.geometry;
    const int32_t column = step * kDepth + threadIdx.x % kDepth;
    const int32_t row_tile = first_row_tile_ + FirstRow() / kDepth;
    const int first = FirstRow() % kDepth;
    KeptRows kept{0, 0};
    int64_t block = 0;
    if (column < geometry.out_features && row_tile < RowTiles(geometry)) {
      const RowTile rows = RowTileAt(geometry, row_tile);
      block = (batch_ * geometry.windows + rows.window) * geometry.out_blocks + column / geometry.bn;
      kept = FindKeptRows(geometry, problem_.mask + block * geometry.mask_words, rows.first_row);
    }
    const int32_t skipped = __popc(kept.bits & ((1u << first) - 1));
    const int64_t list = block * geometry.q * geometry.bk + kept.first + skipped;
    LoadColumn(problem_.values, list * geometry.bn + column % geometry.bn, geometry.bn, kept.bits >> first, run);
  }

  __device__ void StoreA(float (&tile)[kDepth][kStride], const float (&run)[kRun]) const {
    StoreDown(tile, threadIdx.x / kTile * kRun, threadIdx.x % kTile, run);
  }
  __device__ void StoreB(float (&tile)[kDepth][kStride], const float (&run)[kRun]) const {
    StoreAcross(tile, threadIdx.x % kDepth, FirstRow(), run);
  }

  __device__ void Emit(const float (&out)[kTile][kStride]) const {
    const Geometry& geometry = problem_.geometry;
    const int column = threadIdx.x % kTile;
    const int32_t row_tile = first_row_tile_ + column / kDepth;
    if (row_tile >= RowTiles(geometry)) return;
    const RowTile rows = RowTileAt(geometry, row_tile);
    if (column % kDepth >= rows.rows) return;
    const int tokens = static_cast<int>(min(int64_t{kTile}, geometry.tokens - token_));
#pragma unroll 1
    for (int t = threadIdx.x / kTile; t < tokens; t += kThreads / kTile) {
      const int64_t row = batch_ * geometry.tokens + token_ + t;
      StoreResult(problem_.result, row * geometry.in_features + rows.k + column % kDepth, out[t][column]);
    }
  }

 private:
  __device__ static int FirstRow() { return threadIdx.x / kDepth * kRun; }  // of this thread's run, inside the tile

  const Problem& problem_;
  int64_t token_, batch_;
  int32_t first_row_tile_;
};

constexpr int kWarps = 16;
constexpr int kGather = 8;  // columns of a lane in flight

template <int kTokens>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1) FewTokensSpmmT(const __grid_constant__ Problem problem) {
  __shared__ __align__(16) float shared[kWarps][kWarpSize][kTokens];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t token_tiles = CeilDiv(geometry.tokens, kTokens);
  const int64_t row_tiles = RowTiles(geometry);
  const int32_t groups = static_cast<int32_t>(CeilDiv(geometry.out_features, kWarpSize));
  float (&g)[kWarpSize][kTokens] = shared[warp];

  for (int64_t tile = blockIdx.x; tile < geometry.batch * token_tiles * row_tiles; tile += gridDim.x) {
    const int64_t token = tile % token_tiles * kTokens;
    const RowTile rows = RowTileAt(geometry, static_cast<int32_t>(tile / token_tiles % row_tiles));
    const int64_t batch = tile / token_tiles / row_tiles;
    const int64_t row_of_g = batch * geometry.tokens + token;
    const int tokens = static_cast<int>(min(int64_t{kTokens}, geometry.tokens - token));
    const int64_t window = batch * geometry.windows + rows.window;
    float sum[kTokens] = {};

    for (int32_t group = warp; group < groups; group += kWarps) {
      const int32_t column = group * kWarpSize + lane;
      const bool inside = column < geometry.out_features;
      KeptRows kept{0, 0};
      int64_t list = 0;
      if (inside) {
        const int64_t block = window * geometry.out_blocks + column / geometry.bn;
        kept = FindKeptRows(geometry, problem.mask + block * geometry.mask_words, rows.first_row);
        list = (block * geometry.q * geometry.bk + kept.first) * geometry.bn + column % geometry.bn;
      }
      __syncwarp();  // the last group's columns of g have been read
      WithInputType(problem.g.dtype, [&](auto zero) {
        const auto* source = static_cast<const decltype(zero)*>(problem.g.data) + column;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          g[lane][t] = inside && t < tokens ? ToFloat(source[(row_of_g + t) * geometry.out_features]) : 0.0f;
        }
      });
      __syncwarp();
      WithInputType(problem.values.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* values = static_cast<const T*>(problem.values.data);
#pragma unroll 1
        for (int base = 0; base < kWarpSize; base += kGather) {
          T gathered[kGather];
          uint32_t present = 0;
#pragma unroll
          for (int i = 0; i < kGather; ++i) {
            const uint32_t bits = __shfl_sync(0xffffffffu, kept.bits, base + i);
            const int64_t first = __shfl_sync(0xffffffffu, list, base + i);
            if (bits >> lane & 1) {
              const int32_t rank = __popc(bits & ((1u << lane) - 1));
              gathered[i] = values[first + int64_t{rank} * geometry.bn];
              present |= 1u << i;
            }
          }
#pragma unroll
          for (int i = 0; i < kGather; ++i) {
            if (present >> i & 1) {
              const float value = ToFloat(gathered[i]);
#pragma unroll
              for (int t = 0; t < kTokens; ++t) sum[t] += value * g[base + i][t];
            }
          }
        }
      });
    }

    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTokens; ++t) g[lane][t] = sum[t];
    __syncthreads();
    if (warp < tokens && lane < rows.rows) {
      float total = 0.0f;
      for (int w = 0; w < kWarps; ++w) total += shared[w][lane][warp];
      StoreResult(problem.result, (row_of_g + warp) * geometry.in_features + rows.k + lane, total);
    }
    __syncthreads();
  }
}

template <int kTokens>
cudaError_t LaunchFewTokens(const Problem& problem, cudaStream_t stream) {
  static_assert(kTokens <= kWarps, "a warp adds up and stores one token");
  const Geometry& geometry = problem.geometry;
  const int64_t tiles = geometry.batch * CeilDiv(geometry.tokens, kTokens) * RowTiles(geometry);
  return LaunchTiles(FewTokensSpmmT<kTokens>, problem, tiles, dim3(kWarps * kWarpSize), 0, stream);
}

}  // namespace
}  // namespace simple

cudaError_t SimpleSpmmT(const Problem& problem, cudaStream_t stream) {
  using namespace simple;  // NOLINT(build/namespaces)
  const int64_t tokens = problem.geometry.tokens;
  if (!FitsIn32Bits(problem.geometry)) return cudaErrorNotSupported;
  if (tokens == 1) return LaunchFewTokens<1>(problem, stream);
  if (tokens <= kFewTokens) return LaunchFewTokens<8>(problem, stream);
  return LaunchTiledProduct<SpmmTTile>(problem, stream);
}

}  // namespace nmsparse::cuda
