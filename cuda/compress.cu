// The kept units of a dense matrix, such as XLA's gradient of a dense weight:
//
//   values[b, w, o, j, :, :] = unit number j that the mask keeps of window w and column block o of dense
//
// Layouts as in expand.cu, the other way round; bits are moved. Values beyond in_features and out_features are zeros,
// and so are those of units that a corrupt mask lacks. Bound by the bytes of dense that are read (all of them where
// columns are kept one by one) and of values. dense_strips.cuh says who owns what. CompressColumns: a lane walks the
// rows and appends those kept to its lists in shared memory, which it then writes out.
#include "cuda/dense_strips.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace dense_strips {
namespace {

template <class T, int kRun>
__global__ void __launch_bounds__(kAcross* kMaskBits / kThreadRows) CompressRows(const __grid_constant__ Arguments a) {
  const Geometry& g = a.geometry;
  const auto out_features = static_cast<int32_t>(g.out_features);
  const int32_t column = static_cast<int32_t>(blockIdx.x * kAcross + threadIdx.x) * kRun;
  const int first = static_cast<int>(threadIdx.y) * kThreadRows;
  if (column >= g.out_blocks * g.bn) return;
  const int32_t column_block = column / g.bn, in_block = column - column_block * g.bn;
  const int32_t all = g.q * g.bk, last_tile = static_cast<int32_t>(RowTilesPerWindow(g) - 1) * kMaskBits;
  for (int32_t index = blockIdx.y; index < a.strips; index += gridDim.y) {
    const Strip strip = StripAt(a, index);
    const int64_t block = strip.window * g.out_blocks + column_block;
    const KeptRows kept = FindKeptRows(g, a.mask + block * g.mask_words, strip.first_row);
    const T* const dense = static_cast<const T*>(a.from) + (strip.row + first) * out_features + column;
    Run<T, kRun> in[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      in[row] = {};
      const bool inside = first + row < strip.rows && column < out_features;
      if ((kept.bits >> (first + row) & 1) && inside) {
        in[row] = *reinterpret_cast<const Run<T, kRun>*>(dense + int64_t{row} * out_features);
      }
    }
    T* const values = static_cast<T*>(a.to) + block * all * g.bn + in_block;
    int32_t rank = kept.first + __popc(kept.bits & ((1u << first) - 1));
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      if (kept.bits >> (first + row) & 1) {
        *reinterpret_cast<Run<T, kRun>*>(values + int64_t{rank} * g.bn) = in[row];
        ++rank;
      }
    }
    if (strip.first_row == last_tile && first == kMaskBits - kThreadRows) {
      for (; rank < all; ++rank) *reinterpret_cast<Run<T, kRun>*>(values + int64_t{rank} * g.bn) = {};
    }
  }
}

// kRun values are written at once: lists are multiples of them, of one mask word.
template <class T, int kRun>
__global__ void __launch_bounds__(kWarps* kWarpSize, 6) CompressColumns(const __grid_constant__ Arguments a) {
  constexpr int kColumns = kLine / sizeof(T), kLaneColumns = 4 / sizeof(T), kInFlight = 8;
  using Word = Run<T, kLaneColumns>;
  __shared__ __align__(16) uint8_t shared[kWarps][kMaskBits][kLine];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto line = static_cast<uint32_t>(__cvta_generic_to_shared(shared[warp])) + lane * 4;
  const auto entry = [&](int i, int c) { return line + i * kLine + c * static_cast<int>(sizeof(T)); };

  Geometry g = a.geometry;
  g.bk = 1;
  if constexpr (kRun > 1) g.mask_words = 1;
  const auto out_features = static_cast<int32_t>(g.out_features);
  const int32_t column = (static_cast<int32_t>(blockIdx.x) * kWarps + warp) * kColumns + lane * kLaneColumns;
  const bool whole = out_features % kLaneColumns == 0 && reinterpret_cast<uintptr_t>(a.from) % 4 == 0;
  if (column >= out_features) return;
  for (int32_t index = blockIdx.y; index < a.strips; index += gridDim.y) {
    const Strip strip = StripAt(a, index);
    const LaneLists<kLaneColumns> lists(a, g, strip, kRun > 1 ? 0 : strip.first_row, column);
    const T* from = static_cast<const T*>(a.from) + strip.row * out_features + column;
    uint32_t next[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) next[c] = entry(0, c);
#pragma unroll
    for (int first = 0; first < kMaskBits; first += kInFlight) {
      Word words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        words[i] = {};
        if (first + i < strip.rows) {
          if (whole) {
            words[i] = *reinterpret_cast<const Word*>(from);
          } else {
#pragma unroll
            for (int c = 0; c < kLaneColumns; ++c) {
              if (column + c < out_features) words[i].v[c] = from[c];
            }
          }
        }
        from += out_features;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          if (lists.bits[c] & 1u << (first + i)) {
            StoreElement(next[c], words[i].v[c]);
            next[c] += kLine;
          }
        }
      }
    }
    const bool ends = strip.first_row + kMaskBits >= g.window_units;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (column + c >= out_features) break;
      T* const list = static_cast<T*>(a.to) + lists.column[c] + lists.rank[c];
      int count = __popc(lists.bits[c]);
      for (const int all = ends ? g.q - lists.rank[c] : count; count < all; ++count) {
        if constexpr (kRun > 1)
          StoreElement(entry(count, c), T{});
        else
          list[count] = T{};
      }
      if constexpr (kRun > 1) {
        for (int first = 0; first < g.q; first += kRun) {
          Run<T, kRun> run;
#pragma unroll
          for (int e = 0; e < kRun; ++e) run.v[e] = LoadElement<T>(entry(first + e, c));
          *reinterpret_cast<Run<T, kRun>*>(list + first) = run;
        }
      } else {
        for (int i = 0; i < __popc(lists.bits[c]); ++i) list[i] = LoadElement<T>(entry(i, c));
      }
    }
  }
}

template <class T>
cudaError_t LaunchCompress(const Arguments& a, cudaStream_t stream) {
  const Geometry& g = a.geometry;
  if (g.bk == 1 && g.bn == 1) {
    constexpr int kRun = kVectorBytes / sizeof(T);
    const bool runs = g.q % kRun == 0 && g.mask_words == 1 && IsAligned(a.to);
    return LaunchStrips(runs ? CompressColumns<T, kRun> : CompressColumns<T, 1>, a, g.out_features,
                        kWarps * kLine / sizeof(T), kWarps * kWarpSize, stream);
  }
  return WithRun<kVectorBytes / sizeof(T)>(a, [&](auto run) {
    return LaunchStrips(CompressRows<T, run()>, a, g.out_blocks * g.bn, kAcross * run(),
                        dim3(kAcross, kMaskBits / kThreadRows), stream);
  });
}

}  // namespace
}  // namespace dense_strips

cudaError_t Compress(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (g.batch == 0 || g.in_features == 0 || g.out_features == 0) return cudaSuccess;
  dense_strips::Arguments a;
  if (problem.g.dtype != problem.result.dtype || !FillArguments(problem, problem.g.data, &a)) {
    return cudaErrorNotSupported;
  }
  switch (problem.result.dtype) {
    case DType::kF32:
      return dense_strips::LaunchCompress<uint32_t>(a, stream);
    case DType::kBF16:
    case DType::kF16:
      return dense_strips::LaunchCompress<uint16_t>(a, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace nmsparse::cuda
