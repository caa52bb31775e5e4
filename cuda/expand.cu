// A weight as a dense matrix, for XLA's products of many tokens:
//
//   dense[b, k, o] = the value of (k, o) where its unit is kept, 0 elsewhere
//
// Layouts. values [batch, windows, out_blocks, q, bk, bn] and dense [batch, in_features, out_features] lie in this
// order
//   of axes. Quantised values may become a float dtype, exactly; otherwise bits are moved.
// Everything here is bound by the bytes of dense, which are written once, and those of values and mask, read once.
// A strip is a row tile (up to 32 rows of one window) of a batch entry; blocks walk strips with a stride of gridDim.y.
//
// ExpandRows: any pattern. A thread owns 8 rows of a strip and kRun neighbouring columns of one column block: 16 bytes
// of
//   dense, or four columns, or one, as sizes and addresses allow.
// ExpandColumns: element-wise patterns, whose columns have kept rows of their own. A warp owns a strip of 128 bytes of
//   columns. A lane copies the lists of the columns of its 4 bytes to shared memory, its bank alone, and then walks the
//   rows, to a list's next entry wherever the row's bit is set. Lanes do not see each other's lists.
//   Shared memory: 8 warps x 32 entries x 128 bytes.
#include <algorithm>

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
  int32_t row_tiles, strips;
};

struct Strip {
  int64_t window;  // counted over the batch, as those of values and mask are
  int64_t row;     // of dense, too
  int32_t first_row, rows;
};

__device__ __forceinline__ Strip StripAt(const Arguments& a, int32_t index) {
  const int32_t batch = index / a.row_tiles;
  const RowTile tile = RowTileAt(a.geometry, index - batch * a.row_tiles);
  return {batch * a.geometry.windows + tile.window, batch * a.geometry.in_features + tile.k, tile.first_row, tile.rows};
}

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

constexpr int kThreadRows = 8, kAcross = 64;

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
    const In* values = static_cast<const In*>(a.values) + (block * (g.q * g.bk) + before) * g.bn + in_block;
    Run<In, kRun> in[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      in[row] = {};
      if (kept.bits >> (first + row) & 1) {
        in[row] = *reinterpret_cast<const Run<In, kRun>*>(values);
        values += g.bn;
      }
    }
    Out* dense = static_cast<Out*>(a.dense) + (strip.row + first) * out_features + column;
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

constexpr int kLine = 128;  // bytes of dense in a row of a warp's strip, a bank for each lane
constexpr int kWarps = 8;

// An element of shared memory.
template <class T>
__device__ __forceinline__ T LoadElement(uint32_t address) {
  uint32_t bits;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("{ .reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(bits) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  }
  T v;
  memcpy(&v, &bits, sizeof(v));
  return v;
}
template <class T>
__device__ __forceinline__ void StoreElement(uint32_t address, T v) {
  uint32_t bits = 0;
  memcpy(&bits, &v, sizeof(v));
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("{ .reg .u16 h; cvt.u16.u32 h, %1; st.shared.u16 [%0], h; }" ::"r"(address), "r"(bits) : "memory");
  } else {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
  }
}

// The columns of a lane in one strip.
template <class In, class Out>
class LaneColumns {
 public:
  static constexpr int kColumns = 4 / sizeof(Out);

  // `lists`: this lane's four bytes of the first line in shared memory.
  __device__ LaneColumns(const Arguments& a, const Geometry& g, const Strip& strip, int first_row, int32_t column,
                         uint32_t lists)
      : lists_(lists) {
    const auto last = static_cast<int32_t>(g.out_features) - 1;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int64_t block = strip.window * g.out_features + min(column + c, last);
      const KeptRows kept = FindKeptRows(g, a.mask + block * g.mask_words, first_row);
      bits_[c] = kept.bits;
      values_[c] = static_cast<const In*>(a.values) + block * g.q + kept.first;
    }
  }

  // The lists to shared memory, of `count` values each, a multiple of kRun.
  template <int kRun>
  __device__ void CopyRuns(int count) const {
    for (int first = 0; first < count; first += kRun) {
      Run<In, kRun> runs[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) runs[c] = *reinterpret_cast<const Run<In, kRun>*>(values_[c] + first);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) StoreElement(Entry(first + e, c), Convert<Out>(runs[c].v[e]));
      }
    }
  }

  // The same, of as many values as are kept.
  __device__ void CopyKept() const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int count = __popc(bits_[c]);
#pragma unroll 4
      for (int i = 0; i < count; ++i) StoreElement(Entry(i, c), Convert<Out>(values_[c][i]));
    }
  }

  // The rows, in turn, as 4 bytes each: store(row, run).
  template <class Store>
  __device__ void Walk(Store&& store) const {
    uint32_t next[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) next[c] = Entry(0, c);
#pragma unroll
    for (int row = 0; row < kMaskBits; ++row) {
      Run<Out, kColumns> run{};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (bits_[c] & 1u << row) {
          run.v[c] = LoadElement<Out>(next[c]);
          next[c] += kLine;
        }
      }
      store(row, run);
    }
  }

 private:
  __device__ uint32_t Entry(int i, int c) const { return lists_ + i * kLine + c * sizeof(Out); }

  const uint32_t lists_;
  uint32_t bits_[kColumns];
  const In* values_[kColumns];
};

// kRun values are read at once: lists are multiples of them, of one mask word.
template <class In, class Out, int kRun>
__global__ void __launch_bounds__(kWarps* kWarpSize, 6) ExpandColumns(const __grid_constant__ Arguments a) {
  constexpr int kColumns = kLine / sizeof(Out), kLaneColumns = 4 / sizeof(Out);
  __shared__ __align__(16) uint8_t shared[kWarps][kMaskBits][kLine];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto lists = static_cast<uint32_t>(__cvta_generic_to_shared(shared[warp])) + lane * 4;

  Geometry g = a.geometry;
  g.bk = 1;
  if constexpr (kRun > 1) g.mask_words = 1;
  const auto out_features = static_cast<int32_t>(g.out_features);
  const int32_t column = (static_cast<int32_t>(blockIdx.x) * kWarps + warp) * kColumns + lane * kLaneColumns;
  const bool whole = out_features % kLaneColumns == 0 && reinterpret_cast<uintptr_t>(a.dense) % 4 == 0;
  if (column >= out_features) return;
  for (int32_t index = blockIdx.y; index < a.strips; index += gridDim.y) {
    const Strip strip = StripAt(a, index);
    const LaneColumns<In, Out> columns(a, g, strip, kRun > 1 ? 0 : strip.first_row, column, lists);
    if constexpr (kRun > 1) {
      columns.template CopyRuns<kRun>(g.q);
    } else {
      columns.CopyKept();
    }
    Out* to = static_cast<Out*>(a.dense) + strip.row * out_features + column;
    if (whole) {
      columns.Walk([&](int row, const Run<Out, kLaneColumns>& run) {
        if (row < strip.rows) *reinterpret_cast<Run<Out, kLaneColumns>*>(to) = run;
        to += out_features;
      });
    } else {
      columns.Walk([&](int row, const Run<Out, kLaneColumns>& run) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          if (row < strip.rows && column + c < out_features) to[c] = run.v[c];
        }
        to += out_features;
      });
    }
  }
}

// `across`: columns of a block of threads.
template <class Kernel>
cudaError_t LaunchStrips(Kernel* kernel, const Arguments& a, int across, dim3 threads, cudaStream_t stream) {
  const dim3 grid(GridSize(CeilDiv(a.geometry.out_features, across)),
                  static_cast<unsigned>(std::min<int64_t>(a.strips, kMaxGridYz)));
  kernel<<<grid, threads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class In, class Out>
cudaError_t Launch(const Arguments& a, cudaStream_t stream) {
  const Geometry& g = a.geometry;
  if (g.bk == 1 && g.bn == 1) {
    constexpr int kRun = kVectorBytes / sizeof(In);
    const bool runs = g.q % kRun == 0 && g.mask_words == 1 && IsAligned(a.values);
    return LaunchStrips(runs ? ExpandColumns<In, Out, kRun> : ExpandColumns<In, Out, 1>, a,
                        kWarps * kLine / sizeof(Out), kWarps * kWarpSize, stream);
  }
  const auto launch = [&](auto run) {
    constexpr int kRun = decltype(run)::value;
    return LaunchStrips(ExpandRows<In, Out, kRun>, a, kAcross * kRun, dim3(kAcross, kMaskBits / kThreadRows), stream);
  };
  const auto allows = [&](int run) { return g.bn % run == 0 && g.out_features % run == 0; };
  constexpr int kRun = kVectorBytes / sizeof(Out);
  if (IsAligned(a.values) && IsAligned(a.dense)) {
    if (allows(kRun)) return launch(std::integral_constant<int, kRun>());
    if (allows(4)) return launch(std::integral_constant<int, 4>());
  }
  return launch(std::integral_constant<int, 1>());
}

}  // namespace
}  // namespace expand

cudaError_t Expand(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (g.batch == 0 || g.in_features == 0 || g.out_features == 0) return cudaSuccess;
  // A thread's column is counted in 32 bits, those of the last block beyond out_features too.
  if (g.batch * RowTiles(g) > INT32_MAX || g.out_features > INT32_MAX - 65536) return cudaErrorNotSupported;
  const expand::Arguments a{g,
                            problem.values.data,
                            problem.mask,
                            problem.result.data,
                            static_cast<int32_t>(RowTiles(g)),
                            static_cast<int32_t>(g.batch * RowTiles(g))};
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
