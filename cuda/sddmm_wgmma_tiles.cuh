// What the producers, consumers and writers of sddmm_wgmma.cuh agree on: tile shapes, arguments, shared memory.
#ifndef JAX_NMSPARSE_CUDA_SDDMM_WGMMA_TILES_CUH_
#define JAX_NMSPARSE_CUDA_SDDMM_WGMMA_TILES_CUH_

#include "cuda/kept_units.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda::sddmm {

inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
inline constexpr int kMaxSlots = 8;
inline constexpr int kMaxSplits = 4;
inline constexpr int kMmaColumns = 256;                // rows of xᵀ of a product, its N axis
inline constexpr int kAccumulators = kMmaColumns / 2;  // of a thread
inline constexpr uint32_t kZeroRow = 1u << 31;         // a list entry that stands for a row of zeros
inline constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;

// Which rows of xᵀ a tile takes.
enum class Rows {
  kKept,  // those that one column block keeps: vector- and block-wise weights
  kAll,   // all of some windows, and each column picks its own from the products: element-wise weights
};

template <class T_, Rows kRowsOf_, int kColumns_>
struct Config {
  using T = T_;
  static constexpr Rows kRowsOf = kRowsOf_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRows =
      kColumns == 128 ? kMmaColumns : 2 * kMmaColumns;  // the consumers split the columns first
  static constexpr int kStageBytes = (kColumns + kRows) * kLineBytes;
  static constexpr int kWarpStoreBytes = kRowsOf == Rows::kKept ? 16 * 48 : 16 * kMaskBits * 4;
  static constexpr int kListEntries = kRowsOf == Rows::kKept ? kRows : 0;
  static constexpr int kFixedBytes = kConsumers * 4 * kWarpStoreBytes + kListEntries * 4 + 2 * kMaxSlots * 8;
  static_assert(kColumns == 64 || kColumns == 128, "a consumer owns 64 columns");
};

struct Arguments {
  CUtensorMap g, x;  // x: of Rows::kAll
  Geometry geometry;
  const void* x_data;
  const uint32_t* mask;
  Result result;
  int32_t kept;      // rows that a window keeps of a column block
  int32_t all_rows;  // that tiles are cut from: kept ones of all windows, or all of them
  int32_t row_tiles;
  int32_t column_tiles;
  int32_t tiles;
  int32_t steps;
  int32_t slots;
  int32_t splits;
};

struct Tile {
  int32_t batch, block, column;  // column block, and first column inside it
  int32_t row;                   // first row of the tile
};

template <class C>
__device__ __forceinline__ Tile TileAt(const Arguments& a, int32_t index) {
  const int32_t column = index / a.row_tiles % a.column_tiles * C::kColumns;
  const int32_t bn = a.geometry.bn;
  return {index / a.row_tiles / a.column_tiles, column / bn, column % bn, index % a.row_tiles * C::kRows};
}

template <class C>
struct SharedMap {
  uint32_t base;
  int slots;

  __device__ uint32_t Columns(int slot) const { return base + slot * C::kStageBytes; }
  __device__ uint32_t Rows(int slot) const { return Columns(slot) + C::kColumns * kLineBytes; }
  __device__ uint32_t Store(int warp) const { return base + slots * C::kStageBytes + warp * C::kWarpStoreBytes; }
  __device__ uint32_t List() const { return Store(kConsumers * 4); }
  __device__ uint32_t Full(int slot) const { return List() + C::kListEntries * 4 + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(kMaxSlots + slot); }
};

// A position of a column block's list of kept rows: its window, and where in the window's list.
struct KeptPosition {
  int window, in_window;

  __device__ KeptPosition(const Arguments& a, int position) : window(position / a.kept), in_window(position % a.kept) {}
  __device__ void Advance(const Arguments& a, int positions) {
    for (in_window += positions; in_window >= a.kept; in_window -= a.kept) ++window;
  }
};

// Row of x there: in_features or more where it is padding.
__device__ __noinline__ int64_t KeptRow(const Arguments& a, int32_t batch, int32_t block, KeptPosition at) {
  const Geometry& g = a.geometry;
  const uint32_t bits = __ldg(a.mask + (batch * g.windows + at.window) * g.out_blocks + block);
  const int unit = UnitOfRank(bits, at.in_window / g.bk, g.window_units);
  return (int64_t{at.window} * g.window_units + unit) * g.bk + at.in_window % g.bk;
}

}  // namespace nmsparse::cuda::sddmm

#endif  // JAX_NMSPARSE_CUDA_SDDMM_WGMMA_TILES_CUH_
