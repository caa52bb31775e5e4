// What the kernels that multiply on CUDA cores share: x staged in shared memory, and the sums of a block's threads.
#ifndef JAX_NMSPARSE_CUDA_STAGE_ROWS_CUH_
#define JAX_NMSPARSE_CUDA_STAGE_ROWS_CUH_

#include "cuda/device.cuh"

namespace nmsparse::cuda {

// Rows [0, rows) of one token to shared memory; rows from `present` on are zeros.
template <class Acc, class X>
__device__ __forceinline__ void StageRow(const X* row, int rows, int present, Acc* staged) {
  constexpr int kVector = 16 / sizeof(X);
  if (present == rows && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    for (int i = threadIdx.x * kVector; i < rows; i += blockDim.x * kVector) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(row + i));
      X part[kVector];
      memcpy(part, &raw, 16);
#pragma unroll
      for (int j = 0; j < kVector; j += 4) {
        Acc wide[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) wide[k] = ToAccumulator<Acc>(part[j + k]);
        uint4 quad;
        memcpy(&quad, wide, 16);
        *reinterpret_cast<uint4*>(staged + i + j) = quad;
      }
    }
  } else {
    for (int i = threadIdx.x; i < rows; i += blockDim.x) staged[i] = i < present ? ToAccumulator<Acc>(row[i]) : Acc(0);
  }
}

// The rare dtypes of x, out of the way of the instruction cache.
template <class Acc>
__device__ __noinline__ void StageRowOfAnyType(const void* x, DType dtype, int64_t first, int rows, int present,
                                               Acc* staged) {
  WithInputType<Acc>(
      dtype, [&](auto zero) { StageRow(static_cast<const decltype(zero)*>(x) + first, rows, present, staged); });
}

// `rows` rows of x from `row` on, as accumulators, [token][stride]: C::kTokens tokens, zeros beyond the last one and
// beyond in_features.
template <class C>
__device__ __forceinline__ void StageRows(const Problem& problem, int64_t batch, int64_t row, int rows, int64_t stride,
                                          typename C::Acc* x) {
  using Acc = typename C::Acc;
  const Geometry& geometry = problem.geometry;
#pragma unroll 1
  for (int token = 0; token < C::kTokens; ++token) {
    const int64_t left = token < geometry.tokens ? geometry.in_features - row : 0;
    const int present = static_cast<int>(max(int64_t{0}, min(int64_t{rows}, left)));
    const int64_t first =
        (batch * geometry.tokens + min(int64_t{token}, geometry.tokens - 1)) * geometry.in_features + row;
    Acc* staged = x + token * stride;
    if (std::is_same_v<Acc, float> && problem.x.dtype == DType::kBF16) {
      StageRow(static_cast<const __nv_bfloat16*>(problem.x.data) + first, rows, present, staged);
    } else {
      StageRowOfAnyType<Acc>(problem.x.data, problem.x.dtype, first, rows, present, staged);
    }
  }
}

// As StageRows, but the tokens of a row side by side: [row][C::kTokens] of C::Row, which for several tokens is x's
// dtype or float. A thread takes two rows at a time, a pair of every token.
template <class C>
__device__ __forceinline__ void StageTokens(const Problem& problem, int64_t batch, int64_t row, int rows,
                                            char* staged) {
  using Row = typename C::Row;
  const Geometry& geometry = problem.geometry;
  if constexpr (C::kTokens == 1) {
    StageRows<C>(problem, batch, row, rows, 0, reinterpret_cast<Row*>(staged));
  } else {
    WithInputType(problem.x.dtype, [&](auto zero) {
      using X = decltype(zero);
      if constexpr (std::is_same_v<X, Row> || (std::is_same_v<Row, float> && sizeof(X) == 2)) {
        const int64_t in = geometry.in_features;
        const X* x = static_cast<const X*>(problem.x.data) + batch * geometry.tokens * in + row;
        const bool in_pairs = in % 2 == 0;  // then a pair is aligned, and never half beyond the last row
        for (int i = 2 * threadIdx.x; i < rows; i += 2 * blockDim.x) {
          X read[C::kTokens][2];
#pragma unroll
          for (int token = 0; token < C::kTokens; ++token) {
            read[token][0] = read[token][1] = X(0.0f);
            const X* from = x + token * in + i;
            if (token >= geometry.tokens || row + i >= in) continue;
            if (in_pairs) {
              using Pair = std::conditional_t<sizeof(X) == 2, uint32_t, uint2>;
              const Pair pair = __ldg(reinterpret_cast<const Pair*>(from));
              memcpy(read[token], &pair, sizeof(pair));
            } else {
              read[token][0] = from[0];
              if (row + i + 1 < in) read[token][1] = from[1];
            }
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            __align__(16) Row side_by_side[C::kTokens];
#pragma unroll
            for (int token = 0; token < C::kTokens; ++token) {
              if constexpr (std::is_same_v<X, Row>) {
                side_by_side[token] = read[token][j];
              } else {
                side_by_side[token] = ToFloat(read[token][j]);
              }
            }
            using Vector = std::conditional_t<C::kRowBytes % 16 == 0, uint4, uint2>;
#pragma unroll
            for (int offset = 0; offset < C::kRowBytes; offset += sizeof(Vector)) {
              Vector words;
              memcpy(&words, reinterpret_cast<const char*>(side_by_side) + offset, sizeof(Vector));
              *reinterpret_cast<Vector*>(staged + (i + j) * C::kRowBytes + offset) = words;
            }
          }
        }
      }
    });
  }
}

// sums[slot][results], slots >= 1: adds the slots C::kFolds apart, in ascending order, into the first C::kFolds. All
// threads of the block; begins and ends with a barrier.
template <class C>
__device__ __forceinline__ void FoldSlots(typename C::Acc* sums, int slots, int results) {
  __syncthreads();
  if (slots <= C::kFolds) return;
  for (int i = threadIdx.x; i < C::kFolds * results; i += C::kThreads) {
    typename C::Acc total = sums[i];
    for (int at = i + C::kFolds * results; at < slots * results; at += C::kFolds * results) total += sums[at];
    sums[i] = total;
  }
  __syncthreads();
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_STAGE_ROWS_CUH_
