// Up to 64 tokens, weights with 2 of every 4 rows kept (2:4; q = 16): sparse tensor cores read the format as it is.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  value * x[token, 32 w + k]
//
// as mma.sp.m16n8k32: the rows of A are 16 columns of W, a step is one window, the columns of B are 8 tokens.
//
// A. Lane (g, t) of a fragment holds, for rows g and g + 8, the kept pairs of the groups t and t + 4 of the window's
// eight groups of four rows: two words of the column's eight, as they lie in `values`.
// Metadata: for every kept value its position (2 bits) in its group. Of the two lanes of a quad that the selector
// names, the first supplies groups 0..3 of rows g (low half) and g + 8 (high half), the second groups 4..7; both derive
// them from two mask words. Selector 0 names lanes 0 and 1, selector 1 lanes 2 and 3: one pass over the lanes prepares
// two windows.
//
// A mask that does not keep exactly 2 of every 4 gives wrong numbers; nothing is addressed by it.
//
// Layouts. values [windows, out_features, 16], mask [windows, out_features], x [tokens, in_features].
// A warp owns 32 columns, a block 32 * kWarps and one of `gridDim.y` shares of the windows.
//
// Shared memory, bytes:
//   0      Ring::kBytes * kWarps     weights: ew_ring.cuh. The two 16-byte pieces of a column change places in every
//                                    other four columns: a warp's reads of one word per lane meet all banks
//   then   2 * Chunks::kChunkBytes   x: ew_ring.cuh
//   reused from 0 on at the end: [token][column] partial sums.
// Synchronisation: a warp's ring is private (cp.async groups and __syncwarp). x: cp.async one chunk ahead, one barrier
// per chunk. Partial sums are added over the blocks of the cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPARSE24_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPARSE24_CUH_

#include "cuda/ew_metadata.cuh"
#include "cuda/ew_ring.cuh"

namespace nmsparse::cuda::ew {

template <class X_, int kTokens_, int kWarps_, int kStages_, int kMinBlocks_>
struct Sparse24Config : RingConfig<X_, 16, kTokens_, kWarps_, kStages_, kMinBlocks_, 0, 16> {
  struct Swizzle {
    __device__ __forceinline__ int operator()(int, int column) const { return column / 4 % 2; }
  };
  // Time of a block beside another on its multiprocessor, relative to its time alone (measured).
  static constexpr double kCrowding = kWarps_ <= 4 ? 0.5 : 1.0;
};

template <class X, int kSelector>
__device__ __forceinline__ void MultiplySparse(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               const uint32_t (&b)[4], uint32_t metadata) {
  if constexpr (std::is_same_v<X, __nv_bfloat16>) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  } else {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    Sparse24Kernel(const __grid_constant__ Problem problem, const int32_t split_windows) {
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
  Ring ring;
  ring.Begin(problem, batch, block_column + warp * C::kWarpColumns, first, last, shared + warp * Ring::kBytes);
  Chunks::Fill(problem, batch, first, chunks);
  CommitCopies();
#pragma unroll 1
  for (int i = 0; i < Ring::kStages - 1; ++i) ring.Fill(lane, swizzle);

  // This lane's first word of column quad + 8 i, and the words of the window's other half.
  const uint32_t front = quad * Ring::kColumnBytes + swizzle(0, quad) * kPieceBytes + t * 4;
  const uint32_t back = front ^ kPieceBytes;
  const uint32_t halves = t % 2 == 0 ? 0x5410u : 0x7632u;  // groups 0..3 or 4..7 of two mask words

  float sums[2][C::kTokenTiles][4] = {};
  int buffer = 0, slot = 0;
  for (int chunk = first; chunk < last; chunk += C::kChunkWindows) {
    // x of this chunk rode in the group of the first step of the chunk before: the newest groups are all weights.
    WaitCopies<Ring::kStages - 2>();
    __syncthreads();
    const uint32_t x_lane =
        SharedAddress(chunks) + buffer * Chunks::kChunkBytes + lane % 8 * Chunks::kPitch + lane / 8 * kPieceBytes;
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
      const char* stage = shared + warp * Ring::kBytes + slot * Ring::kStageBytes;
      slot = slot + 1 == Ring::kStages ? 0 : slot + 1;
      uint32_t metadata[2];
#pragma unroll
      for (int w = 0; w < kGroupWindows; ++w) {
        if (w % 2 == 0) {
          const char* words = stage + Ring::kMaskOffset + (w + t / 2) * Ring::kMaskStride + quad * 4;
          uint32_t bits[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) bits[i] = *reinterpret_cast<const uint32_t*>(words + 32 * i);
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            metadata[tile] = Metadata(Permute(bits[2 * tile], bits[2 * tile + 1], halves));
          }
        }
        uint32_t a[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* column = stage + w * Ring::kRunBytes + 8 * i * Ring::kColumnBytes;
          a[i][0] = *reinterpret_cast<const uint32_t*>(column + front);
          a[i][1] = *reinterpret_cast<const uint32_t*>(column + back);
        }
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          uint32_t b[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                       : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                       : "r"(x_lane + n * 8 * Chunks::kPitch + (window + w) * kWindow * 2)
                       : "memory");
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const auto& up = a[2 * tile];
            const auto& down = a[2 * tile + 1];
            if (w % 2 == 0) {
              MultiplySparse<X, 0>(sums[tile][n], up[0], down[0], up[1], down[1], b, metadata[tile]);
            } else {
              MultiplySparse<X, 1>(sums[tile][n], up[0], down[0], up[1], down[1], b, metadata[tile]);
            }
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

#endif  // JAX_NMSPARSE_CUDA_EW_SPARSE24_CUH_
