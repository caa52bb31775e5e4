// Up to 32 tokens, element-wise weights of any density with values of x's dtype: expand to dense fragments in
// registers, multiply on tensor cores.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  value * x[token, 32 w + k]
//
// as mma.m16n8k16 with 16 columns of W as the rows of A and 8 tokens as the columns of B. The order of a sum is free,
// so lane t of a fragment row owns rows 8 t to 8 t + 7 of every window, one byte of the mask word: a window is two
// products, a lane's part of A is its byte expanded to four pairs of rows, and its part of B is 16 bytes of x as they
// lie in memory.
//
// Expansion of a byte, without branches. The kept values of a column are contiguous, those of the byte begin at the
// rank of its first row (the number of bits before it). A table of four entries (the two bits of a pair) fits a
// register, and one byte permute looks four pairs up: the selector of each pair, and how many values it holds. Each
// half byte (four rows) reads three aligned words from shared memory, shifts them to its rank, shifts once more for
// its second pair; one permute per pair then places the values and the zeros.
//
// NaN and infinities in x spread to every column, as in a dense product: zeros of the expanded tile multiply them.
// A mask of more than q bits gives wrong numbers: a lane then reads past its column, at most kByteGap bytes past the
// stage's values, where zeros lie. Where bits are lacking, the last values are not used.
//
// Layouts. values [windows, out_features, q], mask [windows, out_features], x [tokens, in_features].
// A warp owns 32 columns, a block 32 * kWarps and one of `gridDim.y` shares of the windows.
//
// Shared memory, bytes:
//   0      Ring::kBytes * kWarps     weights: ew_ring.cuh
//   then   2 * Chunks::kChunkBytes   x: ew_ring.cuh
//   reused from 0 on at the end: [token][column] partial sums.
// Synchronisation: a warp's ring is private (cp.async groups and __syncwarp). x: cp.async one chunk ahead, one barrier
// per chunk. Partial sums are added over the blocks of the cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_BYTES_CUH_
#define JAX_NMSPARSE_CUDA_EW_BYTES_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/ew_ring.cuh"

namespace nmsparse::cuda::ew {

// The last half byte begins at rank 28 at most, in word 14; two more words follow.
inline constexpr int kByteGap = 64;

template <class X_, int kQ_, int kTokens_, int kWarps_, int kStages_, int kMinBlocks_>
struct ByteConfig : RingConfig<X_, kQ_, kTokens_, kWarps_, kStages_, kMinBlocks_, kByteGap, 64> {
  struct Swizzle {
    __device__ __forceinline__ int operator()(int, int) const { return 0; }
  };
  // Time of a block beside another on its multiprocessor, relative to its time alone.
  static constexpr double kCrowding = 0.5;
  static_assert(kByteGap >= (14 + 3) * 4 - ByteConfig::Ring::kColumnBytes,
                "the last column's reads stay inside the gap");
};

// Four rows: their kept values begin at the shared-memory address `from` + `offset`, the first pair holds first_bits /
// 16 of them. The low halves of the selectors select.
__device__ __forceinline__ void ExpandHalfByte(uint32_t from, int offset, uint32_t first_bits, uint32_t selector0,
                                               uint32_t selector1, uint32_t* pair0, uint32_t* pair1) {
  uint32_t word;  // by hand, so that the offset stays an immediate of the loads
  asm("and.b32 %0, %1, 0xfffffffc;" : "=r"(word) : "r"(from));
  const uint32_t shift = from * 8;  // counts modulo 32
  uint32_t word0, word1, word2;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word0) : "r"(word + offset) : "memory");
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word1) : "r"(word + offset + 4) : "memory");
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word2) : "r"(word + offset + 8) : "memory");
  const uint32_t low = __funnelshift_r(word0, word1, shift), high = __funnelshift_r(word1, word2, shift);
  *pair0 = Permute(low, 0, selector0);
  *pair1 = Permute(__funnelshift_rc(low, high, first_bits), 0, selector1);
}

// What a pair's two mask bits look up, a byte for each of their four values.
struct PairTables {
  // The bytes of the selector for a permute of (a word of values, zero): values to the rows kept, in order, zeros
  // elsewhere.
  uint32_t low, high;
  uint32_t bytes;  // that the pair's kept values take

  // `zero`: one that the compiler cannot see and may differ between lanes. Constants would lie in uniform registers,
  // from where each permute first moves them.
  explicit __device__ __forceinline__ PairTables(uint32_t zero)
      : low(0x10441044u + zero), high(0x32104444u + zero), bytes(0x04020200u + zero) {}
};

// Eight rows of one column as four pairs. `pairs`: two bits of the mask in each half byte.
__device__ __forceinline__ void ExpandByte(const PairTables& tables, uint32_t from, int offset, uint32_t pairs,
                                           uint32_t (&a)[4]) {
  const uint32_t low = Permute(tables.low, 0, pairs), high = Permute(tables.high, 0, pairs);
  const uint32_t bytes = Permute(tables.bytes, 0, pairs);
  // Dot products of bytes run beside the integer pipe, which limits this kernel.
  ExpandHalfByte(from, offset, __dp4a(bytes, 0x00000008u, 0u), Permute(low, high, 0x40), Permute(low, high, 0x51),
                 &a[0], &a[1]);
  ExpandHalfByte(__dp4a(bytes, 0x00000101u, from), offset, __dp4a(bytes, 0x00080000u, 0u), Permute(low, high, 0x62),
                 Permute(low, high, 0x73), &a[2], &a[3]);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    ByteKernel(const __grid_constant__ Problem problem, const int32_t split_windows) {
  using X = typename C::X;
  using Ring = typename C::Ring;
  using Chunks = typename C::Chunks;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int quad = lane / 4, t = lane % 4;
  char* chunks = shared + C::kWarps * Ring::kBytes;
  const int64_t batch = blockIdx.z;
  const int64_t block_column = int64_t{blockIdx.x} * C::kColumns;
  const int first = blockIdx.y * split_windows;
  const int last = static_cast<int>(min(int64_t{first} + split_windows, geometry.windows));

  const typename C::Swizzle swizzle{};
  char* const ring_start = shared + warp * Ring::kBytes;
  Ring ring;
  ring.Begin(problem, batch, block_column + warp * C::kWarpColumns, first, last, ring_start);
#pragma unroll
  for (int i = 0; i < Ring::kStages; ++i) {
    static_assert(Ring::kGapBytes / 4 <= kWarpSize, "a lane clears a word");
    if (lane < Ring::kGapBytes / 4) {
      reinterpret_cast<uint32_t*>(ring_start + i * Ring::kStageBytes + Ring::kGapOffset)[lane] = 0;
    }
  }
  Chunks::Fill(problem, batch, first, chunks);
  CommitCopies();
#pragma unroll 1
  for (int i = 0; i < Ring::kStages - 1; ++i) ring.Fill(lane, swizzle);

  const PairTables tables((geometry.q - C::kQ) * lane);
  const uint32_t below = (1u << 8 * t) - 1;
  const uint32_t own_bytes = t * 0x0011u + (t + 4) * 0x1100u;  // of two mask words

  float sums[C::kTiles][C::kTokenTiles][4] = {};
  int buffer = 0, slot = 0;
  for (int chunk = first; chunk < last; chunk += C::kChunkWindows) {
    // x of this chunk rode in the group of the first step of the chunk before: the newest groups are all weights.
    WaitCopies<Ring::kStages - 2>();
    __syncthreads();
    const uint32_t x_lane =
        SharedAddress(chunks) + buffer * Chunks::kChunkBytes + quad * Chunks::kPitch + t * kPieceBytes;
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
      const char* stage = ring_start + slot * Ring::kStageBytes;
      slot = slot + 1 == Ring::kStages ? 0 : slot + 1;
      const uint32_t values = SharedAddress(stage) + quad * Ring::kColumnBytes;
      const char* words = stage + Ring::kMaskOffset + quad * 4;
#pragma unroll
      for (int w = 0; w < kGroupWindows; ++w) {
        uint32_t a[2 * C::kTiles][4];
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
          const int column = 16 * tile;
          const char* words_of_tile = words + w * Ring::kMaskStride + column * 4;
          const uint32_t up = *reinterpret_cast<const uint32_t*>(words_of_tile);
          const uint32_t down = *reinterpret_cast<const uint32_t*>(words_of_tile + 32);
          // This lane's byte of both words, two bits to a half byte.
          const uint32_t bytes = Permute(up, down, own_bytes);
          uint32_t pairs = (bytes & 0x000f000fu) | (bytes >> 4 & 0x0f000f00u);
          pairs = (pairs | pairs << 2) & 0x33333333u;
          ExpandByte(tables, values + __popc(up & below) * 2, w * Ring::kRunBytes + column * Ring::kColumnBytes, pairs,
                     a[2 * tile]);
          ExpandByte(tables, values + __popc(down & below) * 2, w * Ring::kRunBytes + (column + 8) * Ring::kColumnBytes,
                     pairs >> 16, a[2 * tile + 1]);
        }
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          const uint4 b = LoadShared16(x_lane + n * 8 * Chunks::kPitch + (window + w) * kWindow * 2);
#pragma unroll
          for (int tile = 0; tile < C::kTiles; ++tile) {
            const auto& up = a[2 * tile];
            const auto& down = a[2 * tile + 1];
            block::Mma<X>(sums[tile][n], {up[0], down[0], up[1], down[1]}, b.x, b.y);
            block::Mma<X>(sums[tile][n], {up[2], down[2], up[3], down[3]}, b.z, b.w);
          }
        }
      }
    }
  }

  WaitCopies<0>();
  __syncthreads();
  StoreFragments<C>(problem, sums, reinterpret_cast<float*>(shared), block_column, batch);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_BYTES_CUH_
