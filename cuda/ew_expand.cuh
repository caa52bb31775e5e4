// 4 to 64 tokens, element-wise weights of any density: expand to dense fragments on the fly, multiply on tensor cores.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  value * x[token, 32 w + k]
//
// as mma.m16n8k16 with 16 columns of W as the rows of A and 8 tokens as the columns of B. The order of a sum is free, so
// the four lanes of a fragment row each take a whole window of their own (lane t of the quad: window 4 i + t): a lane
// expands its (column, window) alone, and what it expands is exactly its part of the A fragments.
//
// Expansion. The lane writes its kept values, 2 bytes each, to their positions in a private strip of shared memory: 16
// words (pairs of rows), one below the other in one bank, so that lanes never meet whatever their masks; reads the words
// back, and clears the rows that the mask lacks (strips are never zeroed, they hold what earlier windows left). Per
// kept value: 1 store, about 6 instructions; per dense pair: 1 load and 2.5 instructions.
//
// Zeros of the expanded tile multiply x, as in a dense product: a NaN or infinity in x spoils the sums of every column.
//
// Layouts. values [windows, out_features, q], mask [windows, out_features]: a lane reads the q * size contiguous bytes
// of its (column, window), aligned by construction to the largest power of two in them, and its mask word, one group of
// four windows ahead. x [tokens, in_features].
// A warp owns 32 columns (two m16 tiles), a block 32 * kWarps columns and one of `gridDim.y` shares of the windows.
//
// Shared memory, bytes:
//   0                  4096 * kWarps              strips: [warp][upper, lower 8 rows of a tile][pair of rows][lane]
//   4096 * kWarps      2 * C::kChunkBytes         x, two chunks of kChunkWindows:
//                                                 [group of 4 windows][8-row piece of a window][token][window] 16 bytes,
//                                                 pieces padded by 32 bytes against bank conflicts of the copies
//   reused at the end: [token][column] partial sums.
// Synchronisation: x by cp.async, one chunk ahead, one barrier per chunk. Partial sums are added over the blocks of the
// cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_
#define JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_

#include "cuda/ew_common.cuh"

namespace nmsparse::cuda::ew {

#ifndef EW_INNER
#define EW_INNER 0
#endif

inline constexpr int kQuadWindows = 4;  // windows of a group: one for each lane of a quad
inline constexpr int kPieceRows = 8;    // rows of x in 16 bytes

template <class X_, class Value_, int kQ_, int kTokens_, int kWarps_, int kMinBlocks_ = 1>
struct ExpandConfig {
  using X = X_;
  using Value = Value_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kColumns = 32 * kWarps;
  static constexpr int kTokenTiles = kTokens / 8;
  // Few tokens: a group's x fragments stay in registers for both column tiles; many: the weights' fragments do.
  static constexpr bool kHoldX = kTokens <= 16;
  static constexpr int kChunkWindows = kTokens <= 16 ? 32 : 512 / kTokens;
  static constexpr int kPieceBytes = kTokens * 64 + 32;
  static constexpr int kGroupBytes = 4 * kPieceBytes;
  static constexpr int kChunkBytes = kChunkWindows / kQuadWindows * kGroupBytes;
  static constexpr int kStripBytes = 2048;
  static constexpr int kStripsBytes = 2 * kStripBytes * kWarps;
  static constexpr int kSharedBytes = kStripsBytes + 2 * kChunkBytes + kStripBytes;  // the base is rounded up
  static_assert(sizeof(X) == 2, "fragments hold pairs of 16-bit values");
  static_assert(kTokens % 8 == 0, "a fragment holds 8 tokens");
  static_assert(kTokens * kColumns * 4 <= 2 * kChunkBytes, "the partial sums fit where x was");
};

__device__ __forceinline__ uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

template <class X>
__device__ __forceinline__ void Multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<X, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// The kept values of one (column, window), as loaded.
template <class C>
struct Kept {
  static constexpr int kBytes = C::kQ * static_cast<int>(sizeof(typename C::Value));
  static constexpr int kLoad = ColumnAlignment(kBytes);
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void Load(const char* column) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kLoad) {
      if constexpr (kLoad == 16) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(column + i));
        words[i / 4] = raw.x, words[i / 4 + 1] = raw.y, words[i / 4 + 2] = raw.z, words[i / 4 + 3] = raw.w;
      } else if constexpr (kLoad == 8) {
        const uint2 raw = __ldg(reinterpret_cast<const uint2*>(column + i));
        words[i / 4] = raw.x, words[i / 4 + 1] = raw.y;
      } else if constexpr (kLoad == 4) {
        words[i / 4] = __ldg(reinterpret_cast<const uint32_t*>(column + i));
      } else if constexpr (kLoad == 2) {
        const uint32_t raw = __ldg(reinterpret_cast<const uint16_t*>(column + i));
        words[i / 4] = i % 4 == 0 ? raw : words[i / 4] | raw << 16;
      } else {
        const uint32_t raw = __ldg(reinterpret_cast<const uint8_t*>(column + i));
        words[i / 4] = i % 4 == 0 ? raw : words[i / 4] | raw << (i % 4 * 8);
      }
    }
  }
  // The bits of value j as an X.
  __device__ __forceinline__ uint16_t At(int j) const {
    using Value = typename C::Value;
    using X = typename C::X;
    if constexpr (sizeof(Value) == 2) {
      return static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
    } else {
      const uint8_t byte = static_cast<uint8_t>(words[j / 4] >> (j % 4 * 8));
      Value value;
      memcpy(&value, &byte, 1);
      const X wide = To<X>(ToFloat(value));
      uint16_t bits;
      memcpy(&bits, &wide, 2);
      return bits;
    }
  }
};

// Scatters the kept values to the strip at `strip` (+ 4 * lane); returns the positions written. Bits beyond the q-th
// are ignored; where bits are lacking, the position written (31 or 0) is inside the strip and masked out.
template <class C, class At>
__device__ __forceinline__ uint32_t Scatter(uint32_t strip, uint32_t bits, uint32_t minus_one, const At& at) {
  uint32_t rest = bits;
#pragma unroll
  for (int j = C::kQ - 1; j >= 0; --j) {
    const int row = HighestBit(rest);
    rest += Bit(row) * minus_one;
    // row = 2 pair + half lies at 128 * pair + 2 * half: bits 7..10 and 1 of 66 * row.
    const uint32_t address = (static_cast<uint32_t>(row) * 66 & 0x782u) | strip;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(at(j)) : "memory");
  }
  return bits ^ rest;
}

// fragment[i]: rows 2 i (low half) and 2 i + 1 (high half) of the strip where `bits` has them, else zero.
__device__ __forceinline__ void Gather(uint32_t strip, uint32_t bits, uint32_t (&fragment)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(fragment[i]) : "r"(strip + 128 * i) : "memory");
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t even = bits << (7 - 2 * pair), odd = bits << (6 - 2 * pair);  // the rows' bits on top of the bytes
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t sign = 8 + byte;  // selects the top bit of a byte, eight times
      const uint32_t selector = sign | sign << 4 | (sign + 4) << 8 | (sign + 4) << 12;
      fragment[4 * byte + pair] &= Permute(even, odd, selector);
    }
  }
}

// Asks for the chunk of x that begins at window `window`: 16-byte copies, or element by element where rows of x are not
// aligned. Rows beyond in_features and tokens beyond the last are zeros.
template <class C>
__device__ __forceinline__ void StageX(const Problem& problem, const typename C::X* x, int64_t window, char* chunk) {
  using X = typename C::X;
  const Geometry& geometry = problem.geometry;
  const bool aligned = geometry.in_features % kPieceRows == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  constexpr int kPieces = C::kChunkWindows * 4;
  const int64_t row0 = window * kWindow;
  for (int i = threadIdx.x; i < kPieces * C::kTokens; i += kWarpSize * C::kWarps) {
    const int piece = i % kPieces, token = i / kPieces;
    const int64_t row = row0 + piece * kPieceRows;
    char* to = chunk + piece / 16 * C::kGroupBytes + piece % 4 * C::kPieceBytes + token * 64 + piece / 4 % 4 * 16;
    const X* from = x + token * geometry.in_features + row;
    if (aligned) {
      const bool valid = token < geometry.tokens && row < geometry.in_features;
      CopyAsync<16>(SharedAddress(to), valid ? from : x, valid);
    } else {
      X part[kPieceRows];
#pragma unroll
      for (int k = 0; k < kPieceRows; ++k) {
        part[k] = token < geometry.tokens && row + k < geometry.in_features ? from[k] : To<X>(0.0f);
      }
      uint4 raw;
      memcpy(&raw, part, 16);
      *reinterpret_cast<uint4*>(to) = raw;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kWarpSize* C::kWarps, C::kMinBlocks)
    ExpandKernel(const Problem problem, const int32_t split_windows) {
  using X = typename C::X;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int quad = lane / 4, t = lane % 4;
  const uint32_t base = (SharedAddress(shared) + C::kStripBytes - 1) / C::kStripBytes * C::kStripBytes;
  const uint32_t strips = base + warp * 2 * C::kStripBytes + lane * 4;
  char* chunks = shared + (base - SharedAddress(shared)) + C::kStripsBytes;

  const int64_t batch = blockIdx.z, out = geometry.out_features;
  const int64_t block_column = int64_t{blockIdx.x} * C::kColumns;
  const int64_t first = int64_t{blockIdx.y} * split_windows;
  const int64_t last = min(first + split_windows, geometry.windows);
  const X* x = static_cast<const X*>(problem.x.data) + batch * geometry.tokens * geometry.in_features;

  // This lane's columns: quad + 8 i of the warp's 32; columns beyond the last are read as the last and not stored.
  const char* values = static_cast<const char*>(problem.values.data);
  const char* lane_values;
  const uint32_t* lane_mask;
  int32_t offset[4];  // in columns
  {
    const int64_t column = min(block_column + warp * 32, out - 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) offset[i] = static_cast<int32_t>(min(int64_t{quad + 8 * i}, out - 1 - column));
#if EW_INNER
    for (int i = 0; i < 4; ++i) offset[i] = quad * 4 + i;
    lane_values = values + ((first + t) * out * C::kQ + column + quad * 4) * 2;
#else
    lane_values = values + (batch * geometry.windows * out + (first + t) * out + column) * Kept<C>::kBytes;
#endif
    lane_mask = problem.mask + batch * geometry.windows * out + (first + t) * out + column;
  }
  int64_t lane_window = first + t;  // of the loads
  const uint32_t minus_one = MinusOne();

#if EW_INNER
  uint2 rows[C::kQ];
  uint32_t bits[4];
  auto load = [&]() {
    if (lane_window < last) {
#pragma unroll
      for (int j = 0; j < C::kQ; ++j) rows[j] = __ldg(reinterpret_cast<const uint2*>(lane_values + j * out * 2));
      const uint4 m = __ldg(reinterpret_cast<const uint4*>(lane_mask + quad * 4));
      bits[0] = m.x, bits[1] = m.y, bits[2] = m.z, bits[3] = m.w;
    } else { bits[0] = bits[1] = bits[2] = bits[3] = 0; }
  };
#else
  Kept<C> kept[4];
  uint32_t bits[4];
  auto load = [&](int tile) {
#pragma unroll
    for (int i = 2 * tile; i < 2 * tile + 2; ++i) {
      bits[i] = 0;
      if (lane_window < last) {
        bits[i] = __ldg(lane_mask + offset[i]);
        kept[i].Load(lane_values + offset[i] * Kept<C>::kBytes);
      }
    }
  };
#endif
  auto advance = [&]() {
    lane_window += kQuadWindows;
    lane_values += kQuadWindows * out * Kept<C>::kBytes;
    lane_mask += kQuadWindows * out;
  };
#if EW_INNER
  load();
#else
  load(0);
  load(1);
#endif
  advance();

  float sums[2][C::kTokenTiles][4] = {};
  StageX<C>(problem, x, first, chunks);
  CommitCopies();
  int buffer = 0;
  for (int64_t chunk = first; chunk < last; chunk += C::kChunkWindows) {
    WaitCopies<0>();
    __syncthreads();
    const char* x_chunk = chunks + buffer * C::kChunkBytes;
    buffer ^= 1;
    if (chunk + C::kChunkWindows < last) StageX<C>(problem, x, chunk + C::kChunkWindows, chunks + buffer * C::kChunkBytes);
    CommitCopies();
    const int groups = static_cast<int>(min(int64_t{C::kChunkWindows}, last - chunk) + kQuadWindows - 1) / kQuadWindows;
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      const char* x_group = x_chunk + group * C::kGroupBytes + quad * 64 + t * 16;
      auto x_piece = [&](int token_tile, int piece) {
        return *reinterpret_cast<const uint4*>(x_group + piece * C::kPieceBytes + token_tile * 512);
      };
      uint32_t a[C::kHoldX ? 1 : 2][2][16];
#if EW_INNER
#define EW_AT(i) [&](int j) { return static_cast<uint16_t>(((i) < 2 ? rows[j].x : rows[j].y) >> ((i) % 2 * 16)); }
#define EW_ROW(tile, half) (2 * (tile) + (half))
#else
#define EW_AT(i) [&](int j) { return kept[i].At(j); }
#define EW_ROW(tile, half) (2 * (tile) + (half))
#endif
      if constexpr (C::kHoldX) {
        uint4 b[C::kTokenTiles][4];
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
#pragma unroll
          for (int p = 0; p < 4; ++p) b[n][p] = x_piece(n, p);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          uint32_t used[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = EW_ROW(tile, half);
            used[half] = Scatter<C>(strips + half * C::kStripBytes, bits[i], minus_one, EW_AT(i));
          }
#if EW_INNER
          if (tile == 1) { load(); }
#else
          load(tile);
#endif
#pragma unroll
          for (int half = 0; half < 2; ++half) Gather(strips + half * C::kStripBytes, used[half], a[0][half]);
#pragma unroll
          for (int p = 0; p < 4; ++p) {
#pragma unroll
            for (int n = 0; n < C::kTokenTiles; ++n) {
              Multiply<X>(sums[tile][n], a[0][0][4 * p], a[0][1][4 * p], a[0][0][4 * p + 1], a[0][1][4 * p + 1],
                          b[n][p].x, b[n][p].y);
              Multiply<X>(sums[tile][n], a[0][0][4 * p + 2], a[0][1][4 * p + 2], a[0][0][4 * p + 3],
                          a[0][1][4 * p + 3], b[n][p].z, b[n][p].w);
            }
          }
        }
      } else {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          uint32_t used[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = EW_ROW(tile, half);
            used[half] = Scatter<C>(strips + half * C::kStripBytes, bits[i], minus_one, EW_AT(i));
          }
#if EW_INNER
          if (tile == 1) { load(); }
#else
          load(tile);
#endif
#pragma unroll
          for (int half = 0; half < 2; ++half) Gather(strips + half * C::kStripBytes, used[half], a[tile][half]);
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
#pragma unroll
          for (int n = 0; n < C::kTokenTiles; ++n) {
            const uint4 b = x_piece(n, p);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              Multiply<X>(sums[tile][n], a[tile][0][4 * p], a[tile][1][4 * p], a[tile][0][4 * p + 1],
                          a[tile][1][4 * p + 1], b.x, b.y);
              Multiply<X>(sums[tile][n], a[tile][0][4 * p + 2], a[tile][1][4 * p + 2], a[tile][0][4 * p + 3],
                          a[tile][1][4 * p + 3], b.z, b.w);
            }
          }
        }
      }
      advance();
    }
  }

  // Partial sums to shared memory as [token][column], then over the cluster in order.
  WaitCopies<0>();
  __syncthreads();
  float* partial = reinterpret_cast<float*>(chunks);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#if EW_INNER
        const int column = warp * 32 + quad * 4 + 2 * tile + i / 2, token = 8 * n + 2 * t + i % 2;
#else
        const int column = warp * 32 + 16 * tile + 8 * (i / 2) + quad, token = 8 * n + 2 * t + i % 2;
#endif
        partial[token * C::kColumns + column] = sums[tile][n][i];
      }
    }
  }
  StorePartials<C>(problem, partial, block_column, batch);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_
