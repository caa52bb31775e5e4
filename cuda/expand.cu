// A weight as a dense matrix, for XLA's products of many tokens:
//
//   dense[b, k, o] = the value of (k, o) where its unit is kept, 0 elsewhere
//
// Layouts. values [batch, windows, out_blocks, q, bk, bn] and dense [batch, in_features, out_features] lie in this
// order
//   of axes. Quantised values may become a float dtype, exactly; otherwise bits are moved.
// Bound by the bytes of dense, which are written once, and those of values and mask, read once. dense_strips.cuh says
// who owns what. ExpandColumns: a lane copies its lists to shared memory and then walks the rows, to a list's next
// entry wherever the row's bit is set.
#include "cuda/dense_strips.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace dense_strips {
namespace {

template <class Out, class In>
__device__ __forceinline__ Out Convert(In v) {
  if constexpr (std::is_same_v<In, Out>) {
    return v;
  } else {
    return To<Out>(ToFloat(v));
  }
}

template <class In, class Out, int kRun>
__global__ void __launch_bounds__(kAcross* kMaskBits / kThreadRows) ExpandRows(const __grid_constant__ Arguments a) {
  const Geometry& g = a.geometry;
  const auto out_features = static_cast<int32_t>(g.out_features);
  const int32_t column = static_cast<int32_t>(blockIdx.x * kAcross + threadIdx.x) * kRun;
  const int first = static_cast<int>(threadIdx.y) * kThreadRows;
  if (column >= out_features) return;
  const int32_t column_block = column / g.bn, in_block = column - column_block * g.bn;
  for (int32_t index = blockIdx.y; index < a.strips; index += gridDim.y) {
    const Strip strip = StripAt(a, index);
    const int64_t block = strip.window * g.out_blocks + column_block;
    const KeptRows kept = FindKeptRows(g, a.mask + block * g.mask_words, strip.first_row);
    const int32_t before = kept.first + __popc(kept.bits & ((1u << first) - 1));
    const In* values = static_cast<const In*>(a.from) + (block * (g.q * g.bk) + before) * g.bn + in_block;
    Run<In, kRun> in[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      in[row] = {};
      if (kept.bits >> (first + row) & 1) {
        in[row] = *reinterpret_cast<const Run<In, kRun>*>(values);
        values += g.bn;
      }
    }
    Out* dense = static_cast<Out*>(a.to) + (strip.row + first) * out_features + column;
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      if (first + row >= strip.rows) break;
      Run<Out, kRun> out;
#pragma unroll
      for (int e = 0; e < kRun; ++e) out.v[e] = Convert<Out>(in[row].v[e]);
      *reinterpret_cast<Run<Out, kRun>*>(dense) = out;
      dense += out_features;
    }
  }
}

// kRun values are read at once: lists are multiples of them, of one mask word.
template <class In, class Out, int kRun>
__global__ void __launch_bounds__(kWarps* kWarpSize, 6) ExpandColumns(const __grid_constant__ Arguments a) {
  constexpr int kColumns = kLine / sizeof(Out), kLaneColumns = 4 / sizeof(Out);
  using Word = Run<Out, kLaneColumns>;
  __shared__ __align__(16) uint8_t shared[kWarps][kMaskBits][kLine];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto line = static_cast<uint32_t>(__cvta_generic_to_shared(shared[warp])) + lane * 4;
  const auto entry = [&](int i, int c) { return line + i * kLine + c * static_cast<int>(sizeof(Out)); };

  Geometry g = a.geometry;
  g.bk = 1;
  if constexpr (kRun > 1) g.mask_words = 1;
  const auto out_features = static_cast<int32_t>(g.out_features);
  const int32_t column = (static_cast<int32_t>(blockIdx.x) * kWarps + warp) * kColumns + lane * kLaneColumns;
  const bool whole = out_features % kLaneColumns == 0 && reinterpret_cast<uintptr_t>(a.to) % 4 == 0;
  if (column >= out_features) return;
  for (int32_t index = blockIdx.y; index < a.strips; index += gridDim.y) {
    const Strip strip = StripAt(a, index);
    const LaneLists<kLaneColumns> lists(a, g, strip, kRun > 1 ? 0 : strip.first_row, column);
    const In* const values = static_cast<const In*>(a.from);
    if constexpr (kRun > 1) {
      for (int first = 0; first < g.q; first += kRun) {
        Run<In, kRun> runs[kLaneColumns];
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          runs[c] = *reinterpret_cast<const Run<In, kRun>*>(values + lists.column[c] + first);
        }
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) StoreElement(entry(first + e, c), Convert<Out>(runs[c].v[e]));
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const In* const list = values + lists.column[c] + lists.rank[c];
        const int count = __popc(lists.bits[c]);
#pragma unroll 4
        for (int i = 0; i < count; ++i) StoreElement(entry(i, c), Convert<Out>(list[i]));
      }
    }
    Out* to = static_cast<Out*>(a.to) + strip.row * out_features + column;
    uint32_t next[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) next[c] = entry(0, c);
    // The word of each row in turn.
    const auto walk = [&](auto&& store) {
#pragma unroll
      for (int row = 0; row < kMaskBits; ++row) {
        Word word{};
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          if (lists.bits[c] & 1u << row) {
            word.v[c] = LoadElement<Out>(next[c]);
            next[c] += kLine;
          }
        }
        if (row < strip.rows) store(word);
        to += out_features;
      }
    };
    if (whole) {
      walk([&](const Word& word) { *reinterpret_cast<Word*>(to) = word; });
    } else {
      walk([&](const Word& word) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          if (column + c < out_features) to[c] = word.v[c];
        }
      });
    }
  }
}

template <class In, class Out>
cudaError_t LaunchExpand(const Arguments& a, cudaStream_t stream) {
  const Geometry& g = a.geometry;
  if (g.bk == 1 && g.bn == 1) {
    constexpr int kRun = kVectorBytes / sizeof(In);
    const bool runs = g.q % kRun == 0 && g.mask_words == 1 && IsAligned(a.from);
    return LaunchStrips(runs ? ExpandColumns<In, Out, kRun> : ExpandColumns<In, Out, 1>, a, g.out_features,
                        kWarps * kLine / sizeof(Out), kWarps * kWarpSize, stream);
  }
  return WithRun<kVectorBytes / sizeof(Out)>(a, [&](auto run) {
    return LaunchStrips(ExpandRows<In, Out, run()>, a, g.out_features, kAcross * run(),
                        dim3(kAcross, kMaskBits / kThreadRows), stream);
  });
}

}  // namespace
}  // namespace dense_strips

cudaError_t Expand(const Problem& problem, cudaStream_t stream) {
  using dense_strips::LaunchExpand;
  const Geometry& g = problem.geometry;
  if (g.batch == 0 || g.in_features == 0 || g.out_features == 0) return cudaSuccess;
  dense_strips::Arguments a;
  if (!FillArguments(problem, problem.values.data, &a)) return cudaErrorNotSupported;
  const DType from = problem.values.dtype, to = problem.result.dtype;
  if (from == to) {
    switch (to) {
      case DType::kF32:
        return LaunchExpand<uint32_t, uint32_t>(a, stream);
      case DType::kBF16:
      case DType::kF16:
        return LaunchExpand<uint16_t, uint16_t>(a, stream);
      case DType::kS8:
      case DType::kF8E4M3FN:
        return LaunchExpand<uint8_t, uint8_t>(a, stream);
      default:
        return cudaErrorNotSupported;
    }
  }
  const auto quantised = [&](auto zero) {
    using In = decltype(zero);
    switch (to) {
      case DType::kF32:
        return LaunchExpand<In, float>(a, stream);
      case DType::kBF16:
        return LaunchExpand<In, __nv_bfloat16>(a, stream);
      case DType::kF16:
        return LaunchExpand<In, __half>(a, stream);
      default:
        return cudaErrorNotSupported;
    }
  };
  if (from == DType::kS8) return quantised(int8_t{});
  if (from == DType::kF8E4M3FN) return quantised(E4M3{});
  return cudaErrorNotSupported;
}

}  // namespace nmsparse::cuda
