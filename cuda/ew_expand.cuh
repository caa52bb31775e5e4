// 2 to 64 tokens, element-wise weights of any density: expand to dense fragments on the fly, multiply on tensor cores.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  value * x[token, 32 w + k]
//
// as mma.m16n8k16 with 16 columns of W as the rows of A and 8 tokens as the columns of B. The order of a sum is free, so
// the four lanes of a fragment row each take a whole window of their own (lane t of the quad: window t of the group): a
// lane expands its (column, window) alone, and what it expands is exactly its part of the A fragments.
//
// Expansion. The lane writes its kept values, 2 bytes each, to their positions in a private strip of shared memory: 16
// words (pairs of rows), one below the other in one bank, so that lanes never meet whatever their masks; reads the words
// back, and clears the rows that the mask lacks (strips are never zeroed, they hold what earlier windows left). Per
// kept value: 1 store and about 6 instructions; per dense pair of rows: 1 load and 2.5 instructions.
//
// Zeros of the expanded tile multiply x, as in a dense product: a NaN or infinity in x spoils the sums of every column.
//
// Layouts. values [windows, out_features, q], mask [windows, out_features], x [tokens, in_features].
// A warp owns 16 columns, a block 16 * kWarps and one of `gridDim.y` shares of the windows.
//
// Shared memory, bytes (the base is rounded up to 2048):
//   0      2048 * kWarps             strips: [warp][pair of rows][lane], used for the upper and the lower 8 rows of the
//                                    tile in turn
//   then   Ring::kBytes * kWarps     weights: ew_ring.cuh. The two 16-byte pieces of a column change places in windows 2
//                                    and 3 of a group, so that the quads' 16-byte reads meet all banks
//   then   2 * Chunks::kChunkBytes   x: ew_ring.cuh
//   reused for the partial sums [token][column] at the end, from 0 on.
// Synchronisation: strips are private to a lane, rings to a warp (cp.async groups and __syncwarp). x: cp.async one chunk
// ahead, one barrier per chunk. Partial sums are added over the blocks of the cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_
#define JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_

#include "cuda/ew_ring.cuh"

namespace nmsparse::cuda::ew {

template <class X_, class Value_, int kQ_, int kTokens_, int kWarps_, int kStages_, int kMinBlocks_>
struct ExpandConfig {
  using X = X_;
  using Value = Value_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kTiles = 1;  // m16 tiles of a warp
  static constexpr int kThreads = kWarpSize * kWarps;
  static constexpr int kWarpColumns = 16 * kTiles;
  static constexpr int kColumns = kWarpColumns * kWarps;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kChunkWindows = kTokens <= 16 ? 128 / kTokens : 8;
  static constexpr bool kSwizzled = kQ * sizeof(Value) == 32;
  struct Swizzle {
    __device__ __forceinline__ int operator()(int window, int) const { return kSwizzled ? window / 2 : 0; }
  };
  using Column = KeptColumn<Value, kQ>;
  using Ring = WeightRing<Value, kQ, kWarpColumns, kStages_, kSwizzled ? 64 : 32>;
  using Chunks = XChunks<X, kTokens, kChunkWindows, kThreads, 32>;
  static constexpr int kStripBytes = 2048;
  static constexpr int kStripsBytes = kStripBytes * kWarps;
  static constexpr int kPartialBytes = kTokens * kColumns * 4;
  static constexpr int kPoolBytes = kStripsBytes + Ring::kBytes * kWarps + 2 * Chunks::kChunkBytes;
  static constexpr int kSharedBytes = kStripBytes - 1024 + (kPoolBytes > kPartialBytes ? kPoolBytes : kPartialBytes);
  static_assert(sizeof(X) == 2, "fragments hold pairs of 16-bit values");
  static_assert(kTokens % 8 == 0, "a fragment holds 8 tokens");
  static_assert(kChunkWindows / kGroupWindows >= kStages_ - 1, "x of the next chunk is waited for with the weights");
};

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

// Scatters the kept values to the strip at `strip` (+ 4 * lane); returns the positions written. Bits beyond the q-th
// are ignored; where bits are lacking, the position written is inside the strip and masked out.
template <class C, class Column>
__device__ __forceinline__ uint32_t Scatter(uint32_t strip, uint32_t bits, uint32_t minus_one, const Column& kept) {
  uint32_t rest = bits;
#pragma unroll
  for (int j = C::kQ - 1; j >= 0; --j) {
    const int row = HighestBit(rest);
    rest += Bit(row) * minus_one;
    // row = 2 pair + half lies at 128 * pair + 2 * half: bits 7..10 and 1 of 66 * row.
    const uint32_t address = (static_cast<uint32_t>(row) * 66 & 0x782u) | strip;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(kept.template Bits<typename C::X>(j)) : "memory");
  }
  return bits ^ rest;
}

// fragment[4 p + i]: rows 2 i (low half) and 2 i + 1 (high half) of the 8-row piece that this lane reads as its p-th,
// zero where `bits` lacks them. Lanes 2 and 3 of a quad read pieces 1 0 3 2, so that the same order of x meets all banks.
__device__ __forceinline__ void Gather(uint32_t strip, uint32_t bits, int t, uint32_t (&fragment)[16]) {
  const uint32_t even_pieces = strip + 512 * (t / 2), odd_pieces = strip + 512 - 512 * (t / 2);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t from = (i / 4 % 2 == 0 ? even_pieces : odd_pieces) + 1024 * (i / 8) + 128 * (i % 4);
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(fragment[i]) : "r"(from) : "memory");
  }
  bits = Permute(bits, 0, t / 2 == 0 ? 0x3210u : 0x2301u);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t even = bits << (7 - 2 * pair), odd = bits << (6 - 2 * pair);  // the rows' bits on top of the bytes
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t sign = 8 + byte;  // a selector of the top bit of a byte, eight times
      const uint32_t selector = sign | sign << 4 | (sign + 4) << 8 | (sign + 4) << 12;
      fragment[4 * byte + pair] &= Permute(even, odd, selector);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    ExpandKernel(const __grid_constant__ Problem problem, const int32_t split_windows) {
  using X = typename C::X;
  using Ring = typename C::Ring;
  using Chunks = typename C::Chunks;
  extern __shared__ __align__(1024) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int quad = lane / 4, t = lane % 4;
  const uint32_t base = (SharedAddress(shared) + C::kStripBytes - 1) / C::kStripBytes * C::kStripBytes;
  const uint32_t strip = base + warp * C::kStripBytes + lane * 4;
  char* pool = shared + (base - SharedAddress(shared));
  char* rings = pool + C::kStripsBytes;
  char* chunks = rings + C::kWarps * Ring::kBytes;

  const int64_t batch = blockIdx.z;
  const int64_t block_column = int64_t{blockIdx.x} * C::kColumns;
  const int first = blockIdx.y * split_windows;
  const int last = static_cast<int>(min(int64_t{first} + split_windows, geometry.windows));
  const uint32_t minus_one = MinusOne();

  const typename C::Swizzle swizzle{};
  Ring ring;
  ring.Begin(problem, batch, block_column + warp * C::kWarpColumns, first, last, rings + warp * Ring::kBytes);
  Chunks::Fill(problem, batch, first, chunks);
  CommitCopies();
#pragma unroll 1
  for (int i = 0; i < Ring::kStages - 1; ++i) ring.Fill(lane, swizzle);

  float sums[1][C::kTokenTiles][4] = {};
  int buffer = 0, slot = 0;
  for (int chunk = first; chunk < last; chunk += C::kChunkWindows) {
    // x of this chunk rode in the group of the first step of the chunk before: the newest groups are all weights.
    WaitCopies<Ring::kStages - 2>();
    __syncthreads();
    const char* x_lane = chunks + buffer * Chunks::kChunkBytes + quad * Chunks::kPitch + t * 64;
    buffer ^= 1;
    if (chunk + C::kChunkWindows < last) {
      Chunks::Fill(problem, batch, chunk + C::kChunkWindows, chunks + buffer * Chunks::kChunkBytes);
    }
    const int windows = min(C::kChunkWindows, last - chunk);
#pragma unroll 1
    for (int window = 0; window < windows; window += kGroupWindows) {
      WaitCopies<Ring::kStages - 2>();
      __syncwarp();
      ring.Fill(lane, swizzle);  // overwrites the stage read in the step before
      const char* stage = rings + warp * Ring::kBytes + slot * Ring::kStageBytes;
      slot = slot + 1 == Ring::kStages ? 0 : slot + 1;
      const char* stage_values = stage + t * Ring::kWindowStride;
      const char* stage_mask = stage + Ring::kMaskOffset + t * Ring::kMaskStride;
      uint32_t a[2][16];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 8 * half + quad;
        typename C::Column kept;
        kept.template Load<false>([&](int offset) {
          const int at = column * Ring::kColumnBytes + offset;
          return stage_values + (at / kPieceBytes ^ swizzle(t, column)) * kPieceBytes + at % kPieceBytes;
        });
        kept.Prepare();
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(stage_mask + column * 4);
        Gather(strip, Scatter<C>(strip, bits, minus_one, kept), t, a[half]);
      }
      const char* x_group = x_lane + window * (kWindow * 2);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(x_group + n * 8 * Chunks::kPitch + (p ^ t / 2) * kPieceBytes);
          Multiply<X>(sums[0][n], a[0][4 * p], a[1][4 * p], a[0][4 * p + 1], a[1][4 * p + 1], b.x, b.y);
          Multiply<X>(sums[0][n], a[0][4 * p + 2], a[1][4 * p + 2], a[0][4 * p + 3], a[1][4 * p + 3], b.z, b.w);
        }
      }
    }
  }

  WaitCopies<0>();
  __syncthreads();
  StoreFragments<C>(problem, sums, reinterpret_cast<float*>(pool), block_column, batch);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_
