// What expand.cu and compress.cu share: a weight's dense form, walked by strips.
//
// A strip is a row tile (up to 32 rows of one window) of a batch entry; blocks walk strips with a stride of gridDim.y.
//
// Rows: any pattern. A thread owns 8 rows of a strip and kRun neighbouring columns of one column block: 16 bytes of
//   dense, or four columns, or one, as sizes and addresses allow.
// Columns: element-wise patterns, whose columns have kept rows of their own. A warp owns a strip of 128 bytes of
// columns,
//   a lane the lists of the columns of its 4 bytes, which lie in its bank of shared memory: entry i in line i.
//   Shared memory: 8 warps x 32 entries x 128 bytes. Lanes do not see each other's lists.
#ifndef JAX_NMSPARSE_CUDA_DENSE_STRIPS_CUH_
#define JAX_NMSPARSE_CUDA_DENSE_STRIPS_CUH_

#include <algorithm>

#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace nmsparse::cuda::dense_strips {

constexpr int kVectorBytes = 16;

struct Arguments {
  Geometry geometry;
  const void* from;  // values or the dense form
  const uint32_t* mask;
  void* to;  // the other of them
  int32_t row_tiles, strips;
};

// False where a thread's columns and strips, those of the last block beyond the sizes too, do not fit 32 bits.
inline bool FillArguments(const Problem& problem, const void* from, Arguments* a) {
  const Geometry& g = problem.geometry;
  const int64_t strips = g.batch * RowTiles(g);
  if (strips > INT32_MAX || g.out_blocks * g.bn > INT32_MAX - 65536) return false;
  *a = {g, from, problem.mask, problem.result.data, static_cast<int32_t>(RowTiles(g)), static_cast<int32_t>(strips)};
  return true;
}

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

constexpr int kThreadRows = 8, kAcross = 64;  // of Rows: rows of a thread, threads that share rows
constexpr int kLine = 128;                    // of Columns: bytes of dense in a row of a warp's strip
constexpr int kWarps = 8;

// The lists of a lane's columns in one strip.
template <int kColumns>
struct LaneLists {
  uint32_t bits[kColumns];   // the rows that are kept
  int64_t column[kColumns];  // where the column's values of the window begin
  int32_t rank[kColumns];    // of the first of them that is in the strip

  // `first_row`: of the strip in its window. Columns beyond the last stand for the last.
  __device__ LaneLists(const Arguments& a, const Geometry& g, const Strip& strip, int first_row,
                       int32_t column_of_lane) {
    const auto last = static_cast<int32_t>(g.out_features) - 1;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int64_t block = strip.window * g.out_features + min(column_of_lane + c, last);
      const KeptRows kept = FindKeptRows(g, a.mask + block * g.mask_words, first_row);
      bits[c] = kept.bits;
      rank[c] = kept.first;
      column[c] = block * g.q;
    }
  }
};

// `columns`: of the grid, of which a block of threads takes `across`.
template <class Kernel>
cudaError_t LaunchStrips(Kernel* kernel, const Arguments& a, int64_t columns, int across, dim3 threads,
                         cudaStream_t stream) {
  const dim3 grid(GridSize(CeilDiv(columns, across)), static_cast<unsigned>(std::min<int64_t>(a.strips, kMaxGridYz)));
  kernel<<<grid, threads, 0, stream>>>(a);
  return cudaGetLastError();
}

// f(run): with the columns that a thread of Rows takes, where values and dense allow them, as an integral_constant.
template <int kMost, class F>
cudaError_t WithRun(const Arguments& a, F&& f) {
  const auto allows = [&](int run) { return a.geometry.bn % run == 0 && a.geometry.out_features % run == 0; };
  if (IsAligned(a.from) && IsAligned(a.to)) {
    if (allows(kMost)) return f(std::integral_constant<int, kMost>());
    if (allows(4)) return f(std::integral_constant<int, 4>());
  }
  return f(std::integral_constant<int, 1>());
}

}  // namespace nmsparse::cuda::dense_strips

#endif  // JAX_NMSPARSE_CUDA_DENSE_STRIPS_CUH_
