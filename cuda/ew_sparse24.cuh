// 2 to 64 tokens, weights with 2 of every 4 rows kept (2:4; q = 16): sparse tensor cores read the format as it is.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  value * x[token, 32 w + k]
//
// as mma.sp.m16n8k32: the rows of A are 16 columns of W, a step is one window, the columns of B are 8 tokens.
//
// A. Lane (g, t) of a fragment holds, for rows g and g + 8, the kept pairs of the groups t and t + 4 of the eight groups
// of a step. The order of a sum is free, so a step's group t is the window's group 2 t, and t + 4 is 2 t + 1: a lane's
// share of a column is then 8 contiguous bytes of `values`, and the fragment is loaded straight from device memory.
// Metadata: for every kept value its position (2 bits) in its group. Lane t of the quad that the selector names supplies
// groups 4 t .. 4 t + 3 of rows g (low half) and g + 8 (high half); it derives them from two mask words. Selector 0 names
// lanes 0 and 1 of each quad, selector 1 lanes 2 and 3, so that one pass over the lanes prepares two windows.
// B. x is staged with the groups of a window in the step's order; ldmatrix reads it.
//
// A mask that does not keep exactly 2 of every 4 gives wrong numbers; nothing is addressed by it.
//
// Layouts. values [windows, out_features, 16], mask [windows, out_features], x [tokens, in_features].
// A warp owns 32 columns, a block 32 * kWarps and one of `gridDim.y` shares of the windows.
//
// Shared memory, bytes: 2 * C::kChunkBytes: x, two chunks of kChunkWindows windows:
//   [window][16-byte piece: two groups][token], pieces padded by 16 bytes against bank conflicts of the copies;
//   reused at the end for the partial sums [token][column].
// Synchronisation: x by cp.async, one chunk ahead, one barrier per chunk. Partial sums are added over the blocks of the
// cluster in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPARSE24_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPARSE24_CUH_

#include "cuda/ew_common.cuh"

namespace nmsparse::cuda::ew {

template <class X_, int kTokens_, int kWarps_, int kMinBlocks_ = 1>
struct Sparse24Config {
  using X = X_;
  static constexpr int kTokens = kTokens_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kColumns = 32 * kWarps;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kSteps = 4;  // windows whose weights are in flight at once
  static constexpr int kChunkWindows = kTokens <= 16 ? 32 : 512 / kTokens;
  static constexpr int kPieceBytes = kTokens * 16 + 16;
  static constexpr int kWindowBytes = 4 * kPieceBytes;
  static constexpr int kChunkBytes = kChunkWindows * kWindowBytes;
  static constexpr int kPartialBytes = kTokens * kColumns * 4;
  static constexpr int kSharedBytes = 2 * kChunkBytes > kPartialBytes ? 2 * kChunkBytes : kPartialBytes;
  static_assert(sizeof(X) == 2, "8 bytes are a lane's share of a column");
  static_assert(kChunkWindows % kSteps == 0, "chunks hold whole groups of steps");
};

template <class X>
__device__ __forceinline__ void MultiplySparse(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               const uint32_t (&b)[4], uint32_t metadata, bool second) {
#define NMS_MMA_SP(type, selector)                                                                             \
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type                              \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, " selector ";"                   \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                 \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata))
  if constexpr (std::is_same_v<X, __nv_bfloat16>) {
    if (second) {
      NMS_MMA_SP("bf16", "0x1");
    } else {
      NMS_MMA_SP("bf16", "0x0");
    }
  } else {
    if (second) {
      NMS_MMA_SP("f16", "0x1");
    } else {
      NMS_MMA_SP("f16", "0x0");
    }
  }
#undef NMS_MMA_SP
}

// Metadata of rows g (from mask word `upper`) and g + 8 (`lower`): the window's groups 0, 2, 4, 6, or with odd the groups
// 1, 3, 5, 7.
__device__ __forceinline__ uint32_t Metadata(uint32_t upper, uint32_t lower, int odd) {
  auto every_other_group = [odd](uint32_t bits) {
    bits >>= 4 * odd;
    return (bits & 0x0f0f0f0fu) | (bits >> 4 & 0xf0f0f0f0u);  // wanted: bytes 0 and 2
  };
  const uint32_t groups = __byte_perm(every_other_group(upper), every_other_group(lower), 0x6420);
  // Per group of bits b3 b2 b1 b0, two of them set: the lower position is 0 with b0, 1 with b1 but not b0, else 2; the
  // higher is 3 with b3, else 2 with b2, else 1.
  const uint32_t right = groups >> 1, left = groups << 1;
  return (~groups & right & 0x11111111u) | (~left & ~groups & 0x22222222u) | ((right | ~groups) & 0x44444444u) |
         ((groups | left) & 0x88888888u);
}

template <class C>
__device__ __forceinline__ void StageGroups(const Problem& problem, const typename C::X* x, int64_t window,
                                            char* chunk) {
  using X = typename C::X;
  const Geometry& geometry = problem.geometry;
  const bool aligned = geometry.in_features % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0;
  constexpr int kGroups = C::kChunkWindows * 8;
  const int64_t row0 = window * kWindow;
  for (int i = threadIdx.x; i < kGroups * C::kTokens; i += kWarpSize * C::kWarps) {
    const int group = i % kGroups, token = i / kGroups;
    const int64_t row = row0 + group * 4;
    const int place = group % 8 / 2 + group % 2 * 4;  // of the group in its step
    char* to = chunk + group / 8 * C::kWindowBytes + place / 2 * C::kPieceBytes + token * 16 + place % 2 * 8;
    const X* from = x + token * geometry.in_features + row;
    if (aligned) {
      const bool valid = token < geometry.tokens && row < geometry.in_features;
      CopyAsync<8>(SharedAddress(to), valid ? from : x, valid);
    } else {
      X part[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        part[k] = token < geometry.tokens && row + k < geometry.in_features ? from[k] : To<X>(0.0f);
      }
      uint2 raw;
      memcpy(&raw, part, 8);
      *reinterpret_cast<uint2*>(to) = raw;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kWarpSize* C::kWarps, C::kMinBlocks)
    Sparse24Kernel(const Problem problem, const int32_t split_windows) {
  using X = typename C::X;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int quad = lane / 4, t = lane % 4;
  const int64_t batch = blockIdx.z, out = geometry.out_features;
  const int64_t block_column = int64_t{blockIdx.x} * C::kColumns;
  const int64_t first = int64_t{blockIdx.y} * split_windows;
  const int64_t last = min(first + split_windows, geometry.windows);
  const X* x = static_cast<const X*>(problem.x.data) + batch * geometry.tokens * geometry.in_features;

  // Columns beyond the last are read as the last and not stored.
  const int64_t column = min(block_column + warp * 32, out - 1);
  int32_t offset[4];  // of columns quad + 8 i, in columns
#pragma unroll
  for (int i = 0; i < 4; ++i) offset[i] = static_cast<int32_t>(min(int64_t{quad + 8 * i}, out - 1 - column));
  const int64_t origin = (batch * geometry.windows + first) * out + column;
  const char* lane_values = static_cast<const char*>(problem.values.data) + origin * 32 + t * 8;
  const uint32_t* lane_mask = problem.mask + origin + t / 2 * out;
  int64_t loaded = first;  // the next window to ask for

  uint2 a[C::kSteps][4];
  uint32_t bits[C::kSteps / 2][4];
  auto load = [&](int step) {  // values of window loaded + step; every other step the mask words of two windows
    const bool valid = loaded + step < last;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[step][i] = valid ? __ldg(reinterpret_cast<const uint2*>(lane_values + (step * out + offset[i]) * 32))
                         : make_uint2(0, 0);
    }
    if (step % 2 == 0) {
      const bool mask_valid = loaded + step + t / 2 < last;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[step / 2][i] = mask_valid ? __ldg(lane_mask + step * out + offset[i]) : 0x33333333u;
      }
    }
  };
  auto advance = [&]() {
    loaded += C::kSteps;
    lane_values += C::kSteps * out * 32;
    lane_mask += C::kSteps * out;
  };
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) load(step);
  advance();

  float sums[2][C::kTokenTiles][4] = {};
  StageGroups<C>(problem, x, first, shared);
  CommitCopies();
  int buffer = 0;
  for (int64_t chunk = first; chunk < last; chunk += C::kChunkWindows) {
    WaitCopies<0>();
    __syncthreads();
    const uint32_t x_chunk =
        SharedAddress(shared) + buffer * C::kChunkBytes + lane / 8 * C::kPieceBytes + lane % 8 * 16;
    buffer ^= 1;
    if (chunk + C::kChunkWindows < last) {
      StageGroups<C>(problem, x, chunk + C::kChunkWindows, shared + buffer * C::kChunkBytes);
    }
    CommitCopies();
    const int windows = static_cast<int>(min(int64_t{C::kChunkWindows}, last - chunk));
#pragma unroll 1
    for (int window = 0; window < windows; window += C::kSteps) {
      uint32_t metadata[2];
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        if (step % 2 == 0) {
          metadata[0] = Metadata(bits[step / 2][0], bits[step / 2][1], t % 2);
          metadata[1] = Metadata(bits[step / 2][2], bits[step / 2][3], t % 2);
        }
        const uint32_t x_window = x_chunk + (window + step) * C::kWindowBytes;
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          uint32_t b[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                       : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                       : "r"(x_window + n * 128)
                       : "memory");
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            MultiplySparse<X>(sums[tile][n], a[step][2 * tile].x, a[step][2 * tile + 1].x, a[step][2 * tile].y,
                              a[step][2 * tile + 1].y, b, metadata[tile], step % 2 != 0);
          }
        }
        load(step);
      }
      advance();
    }
  }

  WaitCopies<0>();
  __syncthreads();
  float* partial = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = warp * 32 + 16 * tile + 8 * (i / 2) + quad, token = 8 * n + 2 * t + i % 2;
        partial[token * C::kColumns + at] = sums[tile][n][i];
      }
    }
  }
  StorePartials<C>(problem, partial, block_column, batch);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_SPARSE24_CUH_
