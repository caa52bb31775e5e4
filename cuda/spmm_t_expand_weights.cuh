// The weights of spmm_t_expand.cuh: what a stage holds of them, and how they become operands in registers.
#ifndef JAX_NMSPARSE_CUDA_SPMM_T_EXPAND_WEIGHTS_CUH_
#define JAX_NMSPARSE_CUDA_SPMM_T_EXPAND_WEIGHTS_CUH_

#include "cuda/feature_rows.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda::spmm_t_expand {

inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
inline constexpr int kMaxSlots = 8;
inline constexpr int kWindows = 4;  // of a tile
inline constexpr int kTokens = 256;
inline constexpr int kTokenChunks = kTokens / kChunk;
inline constexpr int kChunkBytes = kChunk * kLineBytes;
inline constexpr int kFixedBytes = kConsumers * 4 * kFeatureRowBytes + kLineBytes + 2 * kMaxSlots * 8;
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

struct Arguments {
  CUtensorMap values, g;
  Geometry geometry;
  const void* values_data;
  const void* g_data;
  const uint32_t* mask;
  Result result;
  int32_t steps;   // of 64 columns
  int32_t chunks;  // of them, per column block
  int32_t stage_bytes;
  int32_t slots;
  int32_t token_tiles;
  int32_t window_tiles;
  int32_t tiles;
};

using Tile = WindowTile;

__device__ __forceinline__ Tile TileAt(const Arguments& a, int32_t index) {
  return WindowTileAt<kTokens, kWindows>(index, a.token_tiles, a.window_tiles);
}

struct SharedMap {
  uint32_t base;
  int slots, stage_bytes;

  __device__ uint32_t Tokens(int slot) const { return base + slot * stage_bytes; }
  __device__ uint32_t Weights(int slot) const { return Tokens(slot) + kTokenChunks * kChunkBytes; }
  __device__ uint32_t Store(int warp) const { return Tokens(slots) + warp * kFeatureRowBytes; }
  __device__ uint32_t Zeros() const { return Store(kConsumers * 4); }
  __device__ uint32_t Full(int slot) const { return Zeros() + kLineBytes + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(kMaxSlots + slot); }
};

// Registers of the M operand for the 64 columns of a stage, 16 at a time: lane l has rows l / 4 (registers 0 and 2) and
// l / 4 + 8 (1 and 3) of its warp's 16, columns 2 (l % 4) and one more (0 and 1), and 8 more (2 and 3).
using Fragments = uint32_t[kChunk / kMmaDepth][4];

// Vector-wise (1, L): q lines of 64 columns per window, swizzled.
template <class T>
class VectorWeights {
 public:
  static int StageBytes(const Geometry& g) { return kWindows * g.q * kLineBytes; }

  __device__ static uint32_t CopiedBytes(const Arguments& a, const Tile&, int) {
    return kWindows * a.geometry.q * kLineBytes;
  }
  __device__ static void Copy(const Arguments& a, uint32_t to, uint32_t full, const Tile& tile, int step) {
    LoadBox(to, &a.values, full, step % a.chunks * kChunk, 0, step / a.chunks, tile.window, tile.batch);
  }

  // `window`, `first_unit`: of the tile's windows and of its units, the warp's 16 rows. `zeros`: a line of zeros.
  __device__ VectorWeights(const Arguments& a, const Tile& tile, int window, int first_unit, uint32_t zeros)
      : a_(a), window_(window), first_unit_(first_unit), zeros_(zeros), lane_(threadIdx.x % kWarpSize) {
    const Geometry& g = a.geometry;
    // Of windows beyond the last there are no results: any mask will do.
    first_ = (tile.batch * g.windows + min(int64_t{tile.window} + window, g.windows - 1)) * g.out_blocks;
    bits_ = __ldg(a.mask + first_);
  }

  // Steps come in order. Lane l reads row l % 16 of its warp's, the half l / 16 of 16 columns.
  __device__ __forceinline__ void Load(uint32_t weights, int step, Fragments& fragments) {
    if (step % a_.chunks == 0) {
      line_ = LineOf(bits_, first_unit_ + lane_ % 16);
      if (step + a_.chunks < a_.steps) bits_ = __ldg(a_.mask + first_ + step / a_.chunks + 1);
    }
    const uint32_t row = line_ < 0 ? zeros_ : weights + line_ * kLineBytes;
    const uint32_t piece = (lane_ / 16 ^ (line_ & 7)) * 16;
#pragma unroll
    for (int depth = 0; depth < kChunk / kMmaDepth; ++depth) {
      uint32_t (&f)[4] = fragments[depth];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                   : "r"(row + (piece ^ depth * 32))
                   : "memory");
    }
  }

  // Whether the weight of a unit of the window and a column is kept, and what it is.
  __device__ bool Find(int unit, int64_t column, float* weight) const {
    const Geometry& g = a_.geometry;
    const int64_t block = first_ + column / g.bn;
    const int line = LineOf(__ldg(a_.mask + block), unit);
    if (line < 0) return false;
    const int64_t rank = line - window_ * g.q;
    *weight = ToFloat(static_cast<const T*>(a_.values_data)[(block * g.q + rank) * g.bn + column % g.bn]);
    return true;
  }

 private:
  // Line of a stage's values that a unit of the window has, or -1.
  __device__ int LineOf(uint32_t bits, int unit) const {
    const Geometry& g = a_.geometry;
    const int rank = __popc(bits & ((1u << unit) - 1));
    return (bits >> unit & 1) && rank < g.q && unit < g.window_units ? window_ * g.q + rank : -1;
  }

  const Arguments& a_;
  const int window_, first_unit_;
  const uint32_t zeros_;
  const int lane_;
  int64_t first_;  // mask word of the window and the first column block
  uint32_t bits_;
  int line_ = -1;
};

// Element-wise, windows of 32: per window 64 mask words (first, of all windows) and 64 columns of q values.
template <class T>
class ElementWeights {
 public:
  static int StageBytes(const Geometry& g) { return kWindows * kChunk * (4 + g.q * 2); }

  __device__ static uint32_t CopiedBytes(const Arguments& a, const Tile& tile, int step) {
    const Geometry& g = a.geometry;
    const int windows = static_cast<int>(min(int64_t{kWindows}, g.windows - tile.window));
    return windows * Columns(g, step) * (4 + g.q * 2);
  }
  __device__ static void Copy(const Arguments& a, uint32_t to, uint32_t full, const Tile& tile, int step) {
    const Geometry& g = a.geometry;
    const int columns = Columns(g, step);
    for (int i = 0; i < kWindows && tile.window + i < g.windows; ++i) {
      const int64_t first = (tile.batch * g.windows + tile.window + i) * g.out_features + int64_t{step} * kChunk;
      LoadBytes(to + i * kMaskBytes, a.mask + first, columns * 4, full);
      LoadBytes(to + kWindows * kMaskBytes + i * kChunk * g.q * 2, static_cast<const T*>(a.values_data) + first * g.q,
                columns * g.q * 2, full);
    }
  }

  __device__ ElementWeights(const Arguments& a, const Tile& tile, int window, int first_unit, uint32_t)
      : a_(a), window_(window), lane_(threadIdx.x % kWarpSize) {
    const Geometry& g = a.geometry;
    first_ = (tile.batch * g.windows + min(int64_t{tile.window} + window, g.windows - 1)) * g.out_features;
#pragma unroll
    for (int half = 0; half < 2; ++half) bit_[half] = 1u << (first_unit + lane_ / 4 + half * 8);
  }

  __device__ __forceinline__ void Load(uint32_t weights, int step, Fragments& fragments) {
    const int q = a_.geometry.q;
    const int first = lane_ % 4 * 2, valid = Columns(a_.geometry, step);
    const uint32_t masks = weights + window_ * kMaskBytes + first * 4;
    const uint32_t values = weights + kWindows * kMaskBytes + (window_ * kChunk + first) * q * 2;
#pragma unroll
    for (int depth = 0; depth < kChunk / kMmaDepth; ++depth) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int column = depth * kMmaDepth + next * 8;
        uint32_t bits[2];
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(bits[0]), "=r"(bits[1])
                     : "r"(masks + column * 4)
                     : "memory");
        if (first + column >= valid) bits[0] = bits[1] = 0;  // out_features is even
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t low = Pick(values + column * q * 2, bits[0], bit_[half]);
          const uint32_t high = Pick(values + (column + 1) * q * 2, bits[1], bit_[half]);
          fragments[depth][next * 2 + half] = low | high << 16;
        }
      }
    }
  }

  __device__ bool Find(int unit, int64_t column, float* weight) const {
    const uint32_t bits = __ldg(a_.mask + first_ + column);
    const int rank = __popc(bits & ((1u << unit) - 1));
    if (!(bits >> unit & 1) || rank >= a_.geometry.q) return false;
    *weight = ToFloat(static_cast<const T*>(a_.values_data)[(first_ + column) * a_.geometry.q + rank]);
    return true;
  }

 private:
  static constexpr int kMaskBytes = kChunk * 4;

  __device__ static int Columns(const Geometry& g, int step) {
    return static_cast<int>(min(int64_t{kChunk}, g.out_features - int64_t{step} * kChunk));
  }

  // The value of the row that `bit` stands for, of the column whose values start at `list`; zero where it is absent.
  __device__ uint32_t Pick(uint32_t list, uint32_t bits, uint32_t bit) const {
    const int rank = __popc(bits & (bit - 1));
    uint16_t value = 0;
    if ((bits & bit) != 0 && rank < a_.geometry.q) {
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(list + rank * 2) : "memory");
    }
    return value;
  }

  const Arguments& a_;
  const int window_, lane_;
  int64_t first_;  // mask word of the window and the first column
  uint32_t bit_[2];
};

}  // namespace nmsparse::cuda::spmm_t_expand

#endif  // JAX_NMSPARSE_CUDA_SPMM_T_EXPAND_WEIGHTS_CUH_
