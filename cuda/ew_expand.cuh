// Up to 32 tokens, element-wise weights of low density or with quantised values: expand to dense fragments through
// shared memory, multiply on tensor cores. (High densities: ew_bytes.cuh.)
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  value * x[token, 32 w + k]
//
// as mma.m16n8k16 with 16 columns of W as the rows of A and 8 tokens as the columns of B. The order of a sum is free,
// so the four lanes of a fragment row each take a whole window of their own (lane t of the quad: window t of the
// group): a lane expands its (column, window) alone, and what it expands is exactly its part of the A fragments.
//
// Expansion. The lane writes its kept values, 2 bytes each, to their positions in a private strip of shared memory: 16
// words (pairs of rows), one below the other in one bank, so that lanes never meet whatever their masks; reads the
// words back, and clears the rows that the mask lacks (strips are never zeroed, they hold what earlier windows left).
// Per kept value: 1 store and about 6 instructions; per dense pair of rows: 1 load and 2.5 instructions.
//
// Zeros of the expanded tile multiply x, as in a dense product: a NaN or infinity in x spoils the sums of every column.
//
// Layouts. values [windows, out_features, q]: a lane reads the q * size contiguous bytes of its (column, window),
// aligned by construction to the largest power of two in them, one group of four windows ahead. mask [windows,
// out_features]. x [tokens, in_features]. A warp owns 16 columns, a block 16 * kWarps and one of `gridDim.y` shares of
// the windows.
//
// Shared memory, bytes (the base is rounded up to 2048):
//   0      4096 * kWarps             strips: [warp][upper, lower 8 rows of the tile][pair of rows][lane]
//   then   2 * Chunks::kChunkBytes   x: ew_ring.cuh
//   reused for the partial sums [token][column] at the end, from 0 on.
// Synchronisation: strips are private to a lane. x: cp.async one chunk ahead, one barrier per chunk. Partial sums are
// added over the blocks of the cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_
#define JAX_NMSPARSE_CUDA_EW_EXPAND_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/ew_ring.cuh"

namespace nmsparse::cuda::ew {

template <class X_, class Value_, int kQ_, int kTokens_, int kWarps_, int kMinBlocks_>
struct ExpandConfig {
  using X = X_;
  using Value = Value_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kTiles = 1;  // m16 tiles of a warp
  static constexpr int kThreads = kWarpSize * kWarps;
  static constexpr int kColumns = 16 * kTiles * kWarps;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kChunkWindows = kTokens <= 16 ? 128 / kTokens : 8;
  using Column = KeptColumn<Value, kQ>;
  using Chunks = XChunks<X, kTokens, kChunkWindows, kThreads, 32>;
  static constexpr int kStripBytes = 2048;
  static constexpr int kStripsBytes = 2 * kStripBytes * kWarps;
  static constexpr int kPartialBytes = kTokens * kColumns * 4;
  static constexpr int kPoolBytes = kStripsBytes + 2 * Chunks::kChunkBytes;
  static constexpr int kSharedBytes = kStripBytes + (kPoolBytes > kPartialBytes ? kPoolBytes : kPartialBytes);
  // Time of a block beside another on its multiprocessor, relative to its time alone (measured).
  static constexpr double kCrowding = kMinBlocks >= 4 ? 0.3 : 0.5;
  static_assert(sizeof(X) == 2, "fragments hold pairs of 16-bit values");
  static_assert(kTokens % 8 == 0, "a fragment holds 8 tokens");
  static_assert(kChunkWindows % kGroupWindows == 0, "chunks hold whole groups");
};

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
// zero where `bits` lacks them. Lanes 2 and 3 of a quad read pieces 1 0 3 2, so that the same order of x meets all
// banks.
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
  using Chunks = typename C::Chunks;
  using Column = typename C::Column;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int quad = lane / 4, t = lane % 4;
  const uint32_t base = (SharedAddress(shared) + C::kStripBytes - 1) / C::kStripBytes * C::kStripBytes;
  const uint32_t strips = base + warp * 2 * C::kStripBytes + lane * 4;
  char* pool = shared + (base - SharedAddress(shared));
  char* chunks = pool + C::kStripsBytes;

  const int64_t batch = blockIdx.z, out = geometry.out_features;
  const int64_t block_column = int64_t{blockIdx.x} * C::kColumns;
  const int first = blockIdx.y * split_windows;
  const int last = static_cast<int>(min(int64_t{first} + split_windows, geometry.windows));
  const uint32_t minus_one = MinusOne();

  // This lane's columns: quad and quad + 8 of the warp's 16; a column beyond the last is read as the last, not stored.
  const char* values[2];
  const uint32_t* mask[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t column = min(block_column + warp * 16 + 8 * half + quad, out - 1);
    const int64_t origin = (batch * geometry.windows + first + t) * out + column;
    values[half] = static_cast<const char*>(problem.values.data) + origin * Column::kBytes;
    mask[half] = problem.mask + origin;
  }
  Column next[2];
  uint32_t next_bits[2];
  auto load = [&](int window) {  // of the group that begins at `window`
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next_bits[half] = 0;  // beyond the last window: no rows, whatever the values
      if (window + t < last) {
        next_bits[half] = __ldg(mask[half]);
        next[half].template Load<true>([&](int offset) { return values[half] + offset; });
      }
      mask[half] += kGroupWindows * out;
      values[half] += kGroupWindows * out * Column::kBytes;
    }
  };
  load(first);
  Chunks::Fill(problem, batch, first, chunks);
  CommitCopies();

  float sums[C::kTiles][C::kTokenTiles][4] = {};
  int buffer = 0;
  for (int chunk = first; chunk < last; chunk += C::kChunkWindows) {
    WaitCopies<0>();
    __syncthreads();
    const char* x_lane = chunks + buffer * Chunks::kChunkBytes + quad * Chunks::kPitch + t * 64;
    buffer ^= 1;
    if (chunk + C::kChunkWindows < last) {
      Chunks::Fill(problem, batch, chunk + C::kChunkWindows, chunks + buffer * Chunks::kChunkBytes);
    }
    CommitCopies();
    const int end = min(chunk + C::kChunkWindows, last);
#pragma unroll 1
    for (int window = chunk; window < end; window += kGroupWindows) {
      Column kept[2];
      uint32_t bits[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) kept[half] = next[half], bits[half] = next_bits[half];
      load(window + kGroupWindows);
      uint32_t a[2][16];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        kept[half].Prepare();
        bits[half] = Scatter<C>(strips + half * C::kStripBytes, bits[half], minus_one, kept[half]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) Gather(strips + half * C::kStripBytes, bits[half], t, a[half]);
      const char* x_group = x_lane + (window - chunk) * (kWindow * 2);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(x_group + n * 8 * Chunks::kPitch + (p ^ t / 2) * kPieceBytes);
          block::Mma<X>(sums[0][n], {a[0][4 * p], a[1][4 * p], a[0][4 * p + 1], a[1][4 * p + 1]}, b.x, b.y);
          block::Mma<X>(sums[0][n], {a[0][4 * p + 2], a[1][4 * p + 2], a[0][4 * p + 3], a[1][4 * p + 3]}, b.z, b.w);
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
