// What the feature-major kernels of dx share: their tiles, and the way from accumulators of wgmma to rows of the
// result, contiguous along tokens.
#ifndef JAX_NMSPARSE_CUDA_FEATURE_ROWS_CUH_
#define JAX_NMSPARSE_CUDA_FEATURE_ROWS_CUH_

#include "cuda/device.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda {

// First token and window of a tile of dx.
struct WindowTile {
  int32_t batch, token, window;
};

// Tiles of the same tokens follow each other, so that their g is read from the L2 cache.
template <int kTokens, int kWindows>
__device__ __forceinline__ WindowTile WindowTileAt(int32_t index, int32_t token_tiles, int32_t window_tiles) {
  const int32_t in_batch = index % (token_tiles * window_tiles);
  return {index / (token_tiles * window_tiles), in_batch / window_tiles * kTokens, in_batch % window_tiles * kWindows};
}

inline constexpr int kFeatureRowTokens = 32;                         // that pass through shared memory at a time
inline constexpr int kFeatureRowPitch = kFeatureRowTokens * 2 + 16;  // bytes: no bank conflicts
inline constexpr int kFeatureRowBytes = 16 * kFeatureRowPitch;       // of shared memory a warp needs

__device__ __forceinline__ uint32_t RoundPairBits(DType dtype, float low, float high) {
  return dtype == DType::kF16 ? Bits(RoundPair<__half2>(low, high)) : Bits(RoundPair<__nv_bfloat162>(low, high));
}

// Writes the 16 rows of a warp, kTokens tokens from `token` on: d[4 j + i] of lane l is row l / 4 + 8 (i / 2), token
// 8 j + 2 (l % 4) + i % 2. row_of(r): the row of the result that row r is, negative where there is none. `batch`: rows
// of the result before this batch entry. `store`: kFeatureRowBytes of shared memory of the warp; 64 tokens pass at a
// time, and a lane writes 16 bytes of a row.
template <int kTokens, class RowOf>
__device__ __forceinline__ void StoreFeatureRows(const Result& result, int64_t batch, int64_t tokens, int64_t token,
                                                 uint32_t store, const float (&d)[kTokens / 2], RowOf row_of) {
  const int lane = threadIdx.x % kWarpSize;
  if (result.dtype == DType::kF32) {
    const int64_t rows[2] = {row_of(lane / 4), row_of(lane / 4 + 8)};
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 2) {
      const int half = i / 2 % 2;
      const int64_t at = token + i / 4 * 8 + lane % 4 * 2;
      if (rows[half] >= 0 && at < tokens) {
        *reinterpret_cast<float2*>(static_cast<float*>(result.data) + (batch + rows[half]) * tokens + at) =
            make_float2(d[i], d[i + 1]);
      }
    }
    return;
  }
  const uint32_t to = store + lane % 16 * kFeatureRowPitch + lane / 16 * 16;
  const uint32_t from = store + lane / 4 * kFeatureRowPitch + lane % 4 * 16;
#pragma unroll
  for (int first = 0; first < kTokens; first += kFeatureRowTokens) {
#pragma unroll
    for (int pair = 0; pair < kFeatureRowTokens / 16; ++pair) {
      const float* v = d + first / 2 + pair * 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + pair * 32),
                   "r"(RoundPairBits(result.dtype, v[0], v[1])), "r"(RoundPairBits(result.dtype, v[2], v[3])),
                   "r"(RoundPairBits(result.dtype, v[4], v[5])), "r"(RoundPairBits(result.dtype, v[6], v[7]))
                   : "memory");
    }
    __syncwarp();
    const int64_t at = token + first + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = row_of(lane / 4 + i * 8);
      const uint4 bits = LoadShared16(from + i * 8 * kFeatureRowPitch);
      if (row >= 0 && at < tokens) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(result.data) + (batch + row) * tokens + at) = bits;
      }
    }
    __syncwarp();
  }
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_FEATURE_ROWS_CUH_
