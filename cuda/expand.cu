// A weight as a dense matrix, for XLA's products of many tokens:
//
//   dense[b, k, o] = the value of (k, o) where its unit is kept, 0 elsewhere
//
// Layouts. values [batch, windows, out_blocks, q, bk, bn], dense [batch, in_features, out_features], both as they lie
// in
//   memory. Quantised values may become a float dtype, exactly; otherwise bits are moved.
// Everything here is bound by the bytes of dense, which are written once, and those of values and mask, read once.
//
// ExpandRows: any pattern. A thread owns a row tile (up to 32 rows of one window) of kRun neighbouring columns of one
//   column block, 16 bytes of dense, or of one column where sizes or addresses do not allow that.
// ExpandColumns: element-wise patterns, whose columns have kept rows of their own. A warp owns a row tile of 128 bytes
//   of columns: a lane reads the lists of the columns of its 4 bytes and scatters them to a tile of zeros in shared
//   memory, its bank alone; then the warp writes the tile out, 16 bytes a lane.
//   Shared memory: 8 warps x 32 rows x 128 bytes. A warp synchronises with itself alone.
#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace expand {
namespace {

constexpr int kVectorBytes = 16;

struct Arguments {
  Geometry geometry;
  const void* values;
  const uint32_t* mask;
  void* dense;
  int64_t tiles;  // of a warp (ExpandColumns) or a thread (ExpandRows)
};

template <class Out, class In>
__device__ __forceinline__ Out Convert(In v) {
  if constexpr (std::is_same_v<In, Out>) {
    return v;
  } else {
    return To<Out>(ToFloat(v));
  }
}

// kBytes that are aligned to them.
template <int kBytes>
using Vector = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

template <class T, int kRun>
struct alignas(Vector<kRun * sizeof(T)>) Run {
  T v[kRun];
};

template <class In, class Out, int kRun>
__global__ void __launch_bounds__(256) ExpandRows(const __grid_constant__ Arguments a) {
  constexpr int kInFlight = 8;
  const Geometry& g = a.geometry;
  const auto row_tiles = static_cast<int32_t>(RowTiles(g));
  const auto pieces = static_cast<int32_t>(g.out_features / kRun);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < a.tiles; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t strip = i / pieces;
    const auto column = static_cast<int32_t>(i - strip * pieces) * kRun;
    const int64_t batch = strip / row_tiles;
    const RowTile tile = RowTileAt(g, static_cast<int32_t>(strip - batch * row_tiles));
    const int64_t block = (batch * g.windows + tile.window) * g.out_blocks + column / g.bn;
    const KeptRows kept = FindKeptRows(g, a.mask + block * g.mask_words, tile.first_row);
    const In* values = static_cast<const In*>(a.values) + (block * g.q * g.bk + kept.first) * g.bn + column % g.bn;
    Out* dense = static_cast<Out*>(a.dense) + (batch * g.in_features + tile.k) * g.out_features + column;
    uint32_t bits = kept.bits;
    for (int first = 0; first < tile.rows; first += kInFlight, bits >>= kInFlight) {
      Run<In, kRun> in[kInFlight];
#pragma unroll
      for (int row = 0; row < kInFlight; ++row) {
        in[row] = {};
        if (bits >> row & 1) {
          in[row] = *reinterpret_cast<const Run<In, kRun>*>(values);
          values += g.bn;
        }
      }
#pragma unroll
      for (int row = 0; row < kInFlight; ++row) {
        if (first + row >= tile.rows) break;
        Run<Out, kRun> out;
#pragma unroll
        for (int e = 0; e < kRun; ++e) out.v[e] = Convert<Out>(in[row].v[e]);
        *reinterpret_cast<Run<Out, kRun>*>(dense) = out;
        dense += g.out_features;
      }
    }
  }
}

constexpr int kRows = kMaskBits;
constexpr int kLine = 128;  // bytes of a row of the tile, a bank for each lane
constexpr int kWarps = 8;

// kRun values are read at once: lists are multiples of them.
template <class In, class Out, int kRun>
__global__ void __launch_bounds__(kWarps* kWarpSize) ExpandColumns(const __grid_constant__ Arguments a) {
  constexpr int kColumns = kLine / sizeof(Out), kLaneColumns = 4 / sizeof(Out);
  constexpr int kPiece = kVectorBytes / sizeof(Out);
  __shared__ __align__(kVectorBytes) uint8_t shared[kWarps][kRows * kLine];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint8_t* const tile_of_warp = shared[warp];
  uint4* const pieces = reinterpret_cast<uint4*>(tile_of_warp) + lane;
#pragma unroll
  for (int i = 0; i < kRows * kLine / kVectorBytes; i += kWarpSize) pieces[i] = uint4{};

  const Geometry& g = a.geometry;
  const auto row_tiles = static_cast<int32_t>(RowTiles(g));
  const auto column_tiles = static_cast<int32_t>(CeilDiv(g.out_features, kColumns));
  const bool whole_pieces = g.out_features % kPiece == 0 && reinterpret_cast<uintptr_t>(a.dense) % kVectorBytes == 0;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < a.tiles; i += int64_t{gridDim.x} * kWarps) {
    const int64_t strip = i / column_tiles;
    const int64_t first_column = (i - strip * column_tiles) * kColumns;
    const int64_t batch = strip / row_tiles;
    const RowTile tile = RowTileAt(g, static_cast<int32_t>(strip - batch * row_tiles));
    __syncwarp();  // zeros are in place
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int64_t column = first_column + lane * kLaneColumns + c;
      if (column >= g.out_features) continue;
      const int64_t block = (batch * g.windows + tile.window) * g.out_features + column;
      const KeptRows kept = FindKeptRows(g, a.mask + block * g.mask_words, tile.first_row);
      const In* const values = static_cast<const In*>(a.values) + block * g.q + kept.first;
      Out* const lane_column = reinterpret_cast<Out*>(tile_of_warp + lane * 4) + c;
      uint32_t bits = kept.bits;
      const int count = __popc(bits);
      for (int first = 0; first < count; first += kRun) {
        const auto run = *reinterpret_cast<const Run<In, kRun>*>(values + first);
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (bits == 0) break;
          lane_column[(__ffs(bits) - 1) * (kLine / sizeof(Out))] = Convert<Out>(run.v[e]);
          bits &= bits - 1;
        }
      }
    }
    __syncwarp();
    Out* const dense = static_cast<Out*>(a.dense) + (batch * g.in_features + tile.k) * g.out_features + first_column;
    const int column = lane % (kLine / kVectorBytes) * kPiece;
    const auto columns = static_cast<int>(min(int64_t{kColumns}, g.out_features - first_column));
#pragma unroll
    for (int i = 0; i < kRows * kLine / kVectorBytes; i += kWarpSize) {
      const int row = (i + lane) / (kLine / kVectorBytes);
      const auto piece = reinterpret_cast<const Run<Out, kPiece>&>(pieces[i]);
      pieces[i] = uint4{};
      if (row >= tile.rows) continue;
      Out* const to = dense + row * g.out_features + column;
      if (whole_pieces) {
        if (column < columns) *reinterpret_cast<Run<Out, kPiece>*>(to) = piece;
      } else {
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          if (column + e < columns) to[e] = piece.v[e];
        }
      }
    }
  }
}

template <class Kernel>
cudaError_t LaunchTiles(Kernel* kernel, Arguments a, int64_t tiles, int tiles_per_block, int threads,
                        cudaStream_t stream) {
  a.tiles = tiles;
  kernel<<<GridSize(CeilDiv(tiles, tiles_per_block)), threads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class In, class Out>
cudaError_t Launch(const Arguments& a, cudaStream_t stream) {
  const Geometry& g = a.geometry;
  const int64_t strips = g.batch * RowTiles(g);
  if (g.bk == 1 && g.bn == 1) {
    constexpr int kRun = kVectorBytes / sizeof(In);
    const int64_t tiles = strips * CeilDiv(g.out_features, kLine / sizeof(Out));
    // A list begins at a run, and so does the part of it in each row tile where that is all of it.
    const bool runs = g.q % kRun == 0 && g.mask_words == 1 && IsAligned(a.values);
    return LaunchTiles(runs ? ExpandColumns<In, Out, kRun> : ExpandColumns<In, Out, 1>, a, tiles, kWarps,
                       kWarps * kWarpSize, stream);
  }
  constexpr int kRun = kVectorBytes / sizeof(Out), kThreads = 256;
  const bool runs = g.bn % kRun == 0 && g.out_features % kRun == 0 && IsAligned(a.values) && IsAligned(a.dense);
  return LaunchTiles(runs ? ExpandRows<In, Out, kRun> : ExpandRows<In, Out, 1>, a,
                     strips * (g.out_features / (runs ? kRun : 1)), kThreads, kThreads, stream);
}

}  // namespace
}  // namespace expand

cudaError_t Expand(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (g.batch == 0 || g.in_features == 0 || g.out_features == 0) return cudaSuccess;
  if (RowTiles(g) > INT32_MAX || g.out_features > INT32_MAX) return cudaErrorNotSupported;
  const expand::Arguments a{g, problem.values.data, problem.mask, problem.result.data, 0};
  const DType from = problem.values.dtype, to = problem.result.dtype;
  if (from == to) {
    switch (to) {
      case DType::kF32:
        return expand::Launch<uint32_t, uint32_t>(a, stream);
      case DType::kBF16:
      case DType::kF16:
        return expand::Launch<uint16_t, uint16_t>(a, stream);
      case DType::kS8:
      case DType::kF8E4M3FN:
        return expand::Launch<uint8_t, uint8_t>(a, stream);
      default:
        return cudaErrorNotSupported;
    }
  }
  const auto quantised = [&](auto zero) {
    using In = decltype(zero);
    switch (to) {
      case DType::kF32:
        return expand::Launch<In, float>(a, stream);
      case DType::kBF16:
        return expand::Launch<In, __nv_bfloat16>(a, stream);
      case DType::kF16:
        return expand::Launch<In, __half>(a, stream);
      default:
        return cudaErrorNotSupported;
    }
  };
  if (from == DType::kS8) return quantised(int8_t{});
  if (from == DType::kF8E4M3FN) return quantised(E4M3{});
  return cudaErrorNotSupported;
}

}  // namespace nmsparse::cuda
