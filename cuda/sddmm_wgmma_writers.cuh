// How the accumulators of sddmm_wgmma.cuh become values. d[4 j + i] of a thread (warp w of the consumer, lane l) is
// column 16 w + l / 4 + 8 (i / 2) and row 8 j + 2 (l % 4) + i % 2 of its part of the tile.
#ifndef JAX_NMSPARSE_CUDA_SDDMM_WGMMA_WRITERS_CUH_
#define JAX_NMSPARSE_CUDA_SDDMM_WGMMA_WRITERS_CUH_

#include "cuda/feature_rows.cuh"
#include "cuda/sddmm_wgmma_tiles.cuh"

namespace nmsparse::cuda::sddmm {

// Vector- and block-wise: every row of the tile is a kept row.
template <class C>
class BlockWriter {
 public:
  // `store`: 768 bytes of the warp; `columns`, `rows`: first of the warp's 16 columns and of the consumer's rows.
  __device__ BlockWriter(const Arguments& a, uint32_t store, int columns, int rows)
      : a_(a), store_(store), columns_(columns), rows_(rows), lane_(threadIdx.x % kWarpSize) {}

  // Writes `count` rows from the consumer's row `first` on, whose accumulators start at d[0].
  __device__ void Write(const Tile& tile, int first, int count, const float (&d)[kAccumulators]) const {
    if (a_.result.dtype == DType::kF32) {
      StoreFloats(tile, first, count, d);
    } else {
      StoreHalves(tile, first, count, d);
    }
  }

 private:
  static constexpr int kPitch = 48;  // bytes of a kept row on its way out: 16 columns, and no bank conflicts

  // Element of dv at a kept row and the tile's first column.
  __device__ int64_t Place(const Tile& tile, const KeptPosition& at) const {
    const Geometry& g = a_.geometry;
    const int64_t list = (tile.batch * g.windows + at.window) * g.out_blocks + tile.block;
    return (list * a_.kept + at.in_window) * g.bn + tile.column;
  }
  // How many columns from `column` of the tile on are no padding at a kept row: of a row of padding none.
  __device__ int64_t Valid(const Tile& tile, const KeptPosition& at, int column) const {
    const Geometry& g = a_.geometry;
    const bool ragged = int64_t{at.window + 1} * g.window_units * g.bk > g.in_features;
    if (ragged && KeptRow(a_, tile.batch, tile.block, at) >= g.in_features) return 0;
    return g.out_features - (int64_t{tile.block} * g.bn + tile.column + column);
  }

  // Sixteen kept rows of the warp's 16 columns at a time: transposed into shared memory, from there a lane writes 16
  // bytes of a row.
  __device__ void StoreHalves(const Tile& tile, int first, int count, const float (&d)[kAccumulators]) const {
    const uint32_t to = store_ + (lane_ % 8 + lane_ / 16 * 8) * kPitch + lane_ / 8 % 2 * 16;
    const uint32_t from = store_ + lane_ / 2 * kPitch + lane_ % 2 * 16;
    const int column = columns_ + lane_ % 2 * 8;
    int row = tile.row + rows_ + first + lane_ / 2;
    KeptPosition at(a_, row);
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 8) {
      if (i * 2 >= count) break;
      const float* v = d + i;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(RoundPairBits(a_.result.dtype, v[0], v[1])), "r"(RoundPairBits(a_.result.dtype, v[2], v[3])),
                   "r"(RoundPairBits(a_.result.dtype, v[4], v[5])), "r"(RoundPairBits(a_.result.dtype, v[6], v[7]))
                   : "memory");
      __syncwarp();
      uint4 bits = LoadShared16(from);
      if (row < a_.all_rows) {
        const int64_t valid = Valid(tile, at, column);
        if (valid < 8) ClearHalves(bits, valid);
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(a_.result.data) + Place(tile, at) + column) = bits;
      }
      row += 16;
      at.Advance(a_, 16);
      __syncwarp();
    }
  }
  __device__ static void ClearHalves(uint4& bits, int64_t valid) {
    uint32_t* words[4] = {&bits.x, &bits.y, &bits.z, &bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) *words[i] &= valid >= 2 * i + 2 ? ~0u : valid == 2 * i + 1 ? 0xffffu : 0u;
  }
  __device__ void StoreFloats(const Tile& tile, int first, int count, const float (&d)[kAccumulators]) const {
    const int column = columns_ + lane_ / 4;
    int row = tile.row + rows_ + first + lane_ % 4 * 2;
    KeptPosition at(a_, row);
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 2) {  // even: rows of this lane in steps of 8, and the one after each
      if (i * 2 >= count) break;
      const int of = i / 4 * 4 + i % 4 / 2;
      if (row < a_.all_rows) {
        const int64_t valid = Valid(tile, at, column);
        float* to = static_cast<float*>(a_.result.data) + Place(tile, at) + column;
        to[0] = valid > 0 ? d[of] : 0.0f;
        to[8] = valid > 8 ? d[of + 2] : 0.0f;
      }
      const int next = i % 4 == 0 ? 1 : 7;
      row += next;
      at.Advance(a_, next);
    }
  }

  const Arguments& a_;
  const uint32_t store_;
  const int columns_, rows_, lane_;
};

// Element-wise: a column keeps q of the 32 rows of a window, whose values are contiguous; so are those of neighbouring
// columns. The warp's 16 columns of a window are compacted in shared memory and copied from there.
template <class C>
class ElementWriter {
 public:
  __device__ ElementWriter(const Arguments& a, uint32_t store, int columns, int rows)
      : a_(a), store_(store), columns_(columns), rows_(rows), lane_(threadIdx.x % kWarpSize) {}

  __device__ void Write(const Tile& tile, int first, int count, const float (&d)[kAccumulators]) const {
    const Geometry& g = a_.geometry;
    const int64_t column = int64_t{tile.block} + columns_;  // of the warp's 16
    const int here = static_cast<int>(min(int64_t{16}, g.out_features - column));
    const int size = a_.result.dtype == DType::kF32 ? 4 : 2;
    const int bytes = here * g.q * size;
    // The masks of all windows at once: their latency would be paid for each otherwise.
    uint32_t masks[kAccumulators / 16][2];
#pragma unroll
    for (int i = 0; i < kAccumulators / 16; ++i) {
      const int64_t window = (tile.row + rows_ + first) / kMaskBits + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_warp = lane_ / 4 + half * 8;
        const bool exists = i * kMaskBits < count && window < g.windows && of_warp < here;
        masks[i][half] =
            exists ? __ldg(a_.mask + (tile.batch * g.windows + window) * g.out_features + column + of_warp) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kAccumulators / 16; ++i) {
      const int64_t window = (tile.row + rows_ + first) / kMaskBits + i;
      if (i * kMaskBits >= count || window >= g.windows || here <= 0) break;
      const int64_t list = (tile.batch * g.windows + window) * g.out_features + column;
      // Zeros first, for what a corrupt mask leaves of a list.
      for (int at = lane_ * 16; at < bytes; at += kWarpSize * 16) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(store_ + at), "r"(0) : "memory");
      }
      __syncwarp();
      const int rows = static_cast<int>(min(int64_t{kMaskBits}, g.in_features - window * kMaskBits));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_warp = lane_ / 4 + half * 8;
        const uint32_t bits = masks[i][half];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int row = j / 2 * 8 + lane_ % 4 * 2 + j % 2;
          const int rank = __popc(bits & ((1u << row) - 1));
          const float v = row < rows ? d[i * 16 + j / 2 * 4 + half * 2 + j % 2] : 0.0f;
          if ((bits >> row & 1) && rank < g.q) Put(of_warp * g.q + rank, v);
        }
      }
      __syncwarp();
      Copy(static_cast<uint8_t*>(a_.result.data) + list * g.q * size, bytes, size);
      __syncwarp();
    }
  }

 private:
  __device__ void Put(int at, float v) const {
    if (a_.result.dtype == DType::kF32) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(store_ + at * 4), "f"(v) : "memory");
    } else {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(store_ + at * 2),
                   "h"(static_cast<uint16_t>(RoundPairBits(a_.result.dtype, v, 0.0f)))
                   : "memory");
    }
  }

  // Pieces of 16 bytes where the lists start at such addresses and only the last may end between two.
  __device__ void Copy(uint8_t* to, int bytes, int size) const {
    int done = 0;
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      done = bytes / 16 * 16;
      for (int at = lane_ * 16; at < done; at += kWarpSize * 16) {
        *reinterpret_cast<uint4*>(to + at) = LoadShared16(store_ + at);
      }
    }
    for (int at = done + lane_ * size; at < bytes; at += kWarpSize * size) {
      if (size == 4) {
        uint32_t bits;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(store_ + at) : "memory");
        *reinterpret_cast<uint32_t*>(to + at) = bits;
      } else {
        uint16_t bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(store_ + at) : "memory");
        *reinterpret_cast<uint16_t*>(to + at) = bits;
      }
    }
  }

  const Arguments& a_;
  const uint32_t store_;
  const int columns_, rows_, lane_;
};

template <class C>
using Writer = std::conditional_t<C::kRowsOf == Rows::kKept, BlockWriter<C>, ElementWriter<C>>;

}  // namespace nmsparse::cuda::sddmm

#endif  // JAX_NMSPARSE_CUDA_SDDMM_WGMMA_WRITERS_CUH_
