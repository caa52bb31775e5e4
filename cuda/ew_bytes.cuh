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
// A mask of more than q bits gives wrong numbers: a lane then reads past its column, at most kGap bytes past the
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

#include "cuda/ew_expand.cuh"
#include "cuda/ew_expand_byte.cuh"
#include "cuda/ew_ring.cuh"

namespace nmsparse::cuda::ew {

template <class X_, int kQ_, int kTokens_, int kWarps_, int kStages_, int kMinBlocks_>
struct ByteConfig {
  using X = X_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarpSize * kWarps;
  static constexpr int kTiles = 2;  // m16 tiles of a warp
  static constexpr int kWarpColumns = 16 * kTiles;
  static constexpr int kColumns = kWarpColumns * kWarps;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kChunkWindows = kTokens <= 16 ? 128 / kTokens : 8;
  struct Swizzle {
    __device__ __forceinline__ int operator()(int, int) const { return 0; }
  };
  // The last half byte begins at rank 28 at most, in word 14; two more words follow.
  static constexpr int kGap = 64;
  using Ring = WeightRing<X, kQ, kWarpColumns, kStages_, kGap>;
  using Chunks = XChunks<X, kTokens, kChunkWindows, kThreads, 64>;
  static constexpr int kPoolBytes = Ring::kBytes * kWarps + 2 * Chunks::kChunkBytes;
  static constexpr int kPartialBytes = kTokens * kColumns * 4;
  static constexpr int kSharedBytes = kPoolBytes > kPartialBytes ? kPoolBytes : kPartialBytes;
  // Time of a block beside another on its multiprocessor, relative to its time alone.
  static constexpr double kCrowding = 0.5;
  static_assert(sizeof(X) == 2, "fragments hold pairs of 16-bit values");
  static_assert(kGap >= (14 + 3) * 4 - Ring::kColumnBytes, "the last column's reads stay inside the gap");
  static_assert(kChunkWindows / kGroupWindows >= kStages_ - 1, "x of the next chunk is waited for with the weights");
};

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
          const uint32_t pairs = PairsOfBytes(Permute(up, down, own_bytes));
          const int offset = w * Ring::kRunBytes + column * Ring::kColumnBytes;
          ByteOfColumn(tables, values + __popc(up & below) * 2, offset, pairs).Expand(a[2 * tile]);
          ByteOfColumn(tables, values + __popc(down & below) * 2, offset + 8 * Ring::kColumnBytes, pairs >> 16)
              .Expand(a[2 * tile + 1]);
        }
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          const uint4 b = LoadShared16(x_lane + n * 8 * Chunks::kPitch + (window + w) * kWindow * 2);
#pragma unroll
          for (int tile = 0; tile < C::kTiles; ++tile) {
            const auto& up = a[2 * tile];
            const auto& down = a[2 * tile + 1];
            Multiply<X>(sums[tile][n], up[0], down[0], up[1], down[1], b.x, b.y);
            Multiply<X>(sums[tile][n], up[2], down[2], up[3], down[3], b.z, b.w);
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
