// Operands of mma.sync of 1, 2 and 4 bytes an element, from lines of shared memory that hold consecutive columns (or
// tokens) of one k each: block_mma_many.cuh says which lane holds what.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MMA_FRAGMENTS_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MMA_FRAGMENTS_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/tf32.cuh"

namespace nmsparse::cuda::block_mma_many {

inline constexpr int kFragment = 8;  // columns or tokens of a lane, of the warp's 64

template <class T>
inline constexpr int kMmaRows = 32 / sizeof(T);  // rows of k that one mma multiplies

template <class T>
inline constexpr int kFragmentRun = sizeof(T) == 4 ? 4 : 8;  // neighbours among them

// Of the warp's 64 columns (tokens), the one that group `group` (lane / 4) has at place e.
template <class T>
__device__ __forceinline__ constexpr int PlaceInWarp(int group, int e) {
  constexpr int kRun = kFragmentRun<T>;
  return e / kRun * (8 * kRun) + group * kRun + e % kRun;
}

// words[h][e]: half h of the k of one mma, 4 / sizeof(T) of them, of column (token) e.
struct Fragment {
  uint32_t words[2][kFragment];
};

template <class T, int kPitch>
__device__ __forceinline__ void LoadFragment(const unsigned char* lines, Fragment& f) {
  constexpr int kRows = 4 / sizeof(T);  // that share a word
  const int group = threadIdx.x % kWarpSize / 4, lane = threadIdx.x % 4;
  const unsigned char* const from = lines + lane * kPitch + PlaceInWarp<T>(group, 0) * sizeof(T);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const unsigned char* const half = from + h * kRows * 4 * kPitch;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        uint32_t w[4];
        block::LoadWords(w, half + run * 32 * sizeof(T));
#pragma unroll
        for (int i = 0; i < 4; ++i) f.words[h][run * 4 + i] = w[i];
      }
    } else if constexpr (sizeof(T) == 2) {
      uint32_t low[4], high[4];
      block::LoadWords(low, half);
      block::LoadWords(high, half + 4 * kPitch);
#pragma unroll
      for (int e = 0; e < kFragment; ++e) f.words[h][e] = block::PairUp(low[e / 2], high[e / 2], e % 2);
    } else {
      uint32_t rows[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) block::LoadWords(rows[i], half + i * 4 * kPitch);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32_t columns[4];
        block::TransposeBytes(rows[0][w], rows[1][w], rows[2][w], rows[3][w], columns);
#pragma unroll
        for (int i = 0; i < 4; ++i) f.words[h][w * 4 + i] = columns[i];
      }
    }
  }
}

__device__ __forceinline__ void RoundFragment(Fragment& f) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < kFragment; ++e) f.words[h][e] = RoundToTf32(__uint_as_float(f.words[h][e]));
  }
}

// f becomes its nearest TF32, small that of what is left: together 22 significant bits.
__device__ __forceinline__ void SplitFragment(Fragment& f, Fragment& small) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < kFragment; ++e) small.words[h][e] = SplitToTf32(f.words[h][e]);
  }
}

// d [16, 8] += a [16, kMmaRows] b [kMmaRows, 8], registers as in block::Mma.
template <class T, class Acc>
__device__ __forceinline__ void Mma(Acc (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, float>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, int8_t>) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    block::Mma<T>(d, a, b0, b1);
  }
}

template <class T, class Acc>
__device__ __forceinline__ void MultiplyFragments(const Fragment& left, const Fragment& right,
                                                  Acc (&sum)[kFragment / 2][kFragment][4]) {
#pragma unroll
  for (int i = 0; i < kFragment / 2; ++i) {
    const uint32_t a[4] = {left.words[0][2 * i], left.words[0][2 * i + 1], left.words[1][2 * i],
                           left.words[1][2 * i + 1]};
#pragma unroll
    for (int j = 0; j < kFragment; ++j) Mma<T>(sum[i][j], a, right.words[0][j], right.words[1][j]);
  }
}

}  // namespace nmsparse::cuda::block_mma_many

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MMA_FRAGMENTS_CUH_
