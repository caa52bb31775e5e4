// The CUDA kernels, by name: what the handlers look up and what a kernel family plugs into. No XLA here.
//
// To add a family: write its launchers in a file of their own, declare them below, add their rows to the tables, and
// add the file to CMakeLists.txt (NMS_CUDA_SOURCES, or NMS_CUDA_SM90A_SOURCES where it needs sm_90a instructions).
//
// What a launcher promises:
//   * it launches on `stream` only; it never allocates, synchronises, or keeps state, so that it can be captured;
//   * it writes every element of problem.result, at the result's dtype, the same bits at every run;
//   * it returns cudaSuccess or the error of its launch, and cudaErrorNotSupported for a problem outside its domain
//     (a pattern, dtype, size or workspace that dispatch.py should not have sent there): the handler words it.
// Shapes, dtype pairs and sizes are already checked (handlers.cc); empty batches, tokens and columns are not.
#ifndef JAX_NMSPARSE_CUDA_KERNELS_H_
#define JAX_NMSPARSE_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include "common/problem.h"

namespace nmsparse::cuda {

using Launch = cudaError_t (*)(const Problem& problem, cudaStream_t stream);

struct Kernel {
  std::string_view name;
  Launch launch;
  bool feature_major = false;  // x, g, y and dx are [batch, features, tokens] in memory, not [batch, tokens, features]
};

// simple_*.cu: every pattern, shape and dtype, float32 (or int32) arithmetic on CUDA cores.
cudaError_t SimpleSpmm(const Problem& problem, cudaStream_t stream);
cudaError_t SimpleSpmmT(const Problem& problem, cudaStream_t stream);
cudaError_t SimpleSddmm(const Problem& problem, cudaStream_t stream);

// block_many_tokens.cu: vector-wise and block-wise weights of bn a multiple of 64, bfloat16 or float16, on sm_90 alone.
// Feature-major: problem.x holds [batch, in_features, tokens] and the result [batch, out_features, tokens].
cudaError_t BlockWgmmaSpmm(const Problem& problem, cudaStream_t stream);

// Gradients on sm_90 alone, feature-major, of vector- and block-wise weights and of element-wise ones.
// block_t_many_tokens.cu: by x; g and the result are [batch, features, tokens]. sddmm_wgmma.cu: by the values; x and g
// are, the result is plain.
cudaError_t BlockWgmmaSpmmT(const Problem& problem, cudaStream_t stream);
cudaError_t EwWgmmaSpmmT(const Problem& problem, cudaStream_t stream);
cudaError_t BlockWgmmaSddmm(const Problem& problem, cudaStream_t stream);
cudaError_t EwWgmmaSddmm(const Problem& problem, cudaStream_t stream);

// block_fma.cu: vector- and block-wise weights of bn a multiple of 32, float32 on CUDA cores, many tokens.
// Feature-major.
cudaError_t BlockFmaSpmm(const Problem& problem, cudaStream_t stream);

// block_mma_many.cu: bn a multiple of 64, on tensor cores from sm_80 on, many tokens: float32 by TF32 (not at the
// highest precision), bfloat16, float16, int8. Feature-major.
cudaError_t BlockMmaManySpmm(const Problem& problem, cudaStream_t stream);

// block_wgmma_rs.cu: the same for float32 and int8 on Hopper alone.
cudaError_t BlockWgmmaRsSpmm(const Problem& problem, cudaStream_t stream);

// block_few_tokens.cu: 1 to 128 tokens, bfloat16 or float16, bn a multiple of 16, on tensor cores.
// block_spmv.cu: one to four tokens, any dtypes but int8 activations, on CUDA cores, where bytes decide.
// block_simt.cu: few tokens, float32 arithmetic, any block and weight dtype but int8 activations.
// few_tokens_t.cu: the transposed product for few tokens, every pattern and block.
// block_t_mma.cu: the same on tensor cores, vector-wise bfloat16 or float16, bn a multiple of 64, q at most 16.
cudaError_t BlockMmaSpmm(const Problem& problem, cudaStream_t stream);
cudaError_t BlockSpmv(const Problem& problem, cudaStream_t stream);
cudaError_t BlockSimtSpmm(const Problem& problem, cudaStream_t stream);
cudaError_t FewTokensSpmmT(const Problem& problem, cudaStream_t stream);
cudaError_t BlockMmaSpmmT(const Problem& problem, cudaStream_t stream);

// Element-wise weights (block 1x1, windows of 32). ew_spmv.cu: one to four tokens, any dtypes, on CUDA cores;
// ew_spmv_wave.cu: one token of large weights; ew_simt.cu: two to sixteen tokens, the same kernel.
// ew_few_tokens.cu: bfloat16 or float16 x, on tensor cores: EwFewTokens to 32 tokens, EwSparse24 (2 of every 4) to 64.
cudaError_t EwSpmv(const Problem& problem, cudaStream_t stream);
cudaError_t EwSpmvWave(const Problem& problem, cudaStream_t stream);
cudaError_t EwSimt(const Problem& problem, cudaStream_t stream);
cudaError_t EwFewTokens(const Problem& problem, cudaStream_t stream);
cudaError_t EwSparse24(const Problem& problem, cudaStream_t stream);

// ew_many_tokens.cu: element-wise weights, bfloat16 or float16, on sm_90 alone, feature-major as BlockWgmmaSpmm.
// EwWgmmaSparse24: 2 of every 4. EwWgmma: any q, whole windows of in_features.
cudaError_t EwWgmmaSparse24(const Problem& problem, cudaStream_t stream);
cudaError_t EwWgmma(const Problem& problem, cudaStream_t stream);

// Around products of XLA, every pattern. expand.cu: the weight as a dense matrix [batch, in_features, out_features].
// compress.cu: the kept units of such a matrix, problem.g.
cudaError_t Expand(const Problem& problem, cudaStream_t stream);
cudaError_t Compress(const Problem& problem, cudaStream_t stream);

inline constexpr Kernel kSpmmKernels[] = {
    {"simple", SimpleSpmm},
    {"block_mma", BlockMmaSpmm},
    {"block_spmv", BlockSpmv},
    {"block_simt", BlockSimtSpmm},
    {"ew_spmv", EwSpmv},
    {"ew_spmv_wave", EwSpmvWave},
    {"ew_simt", EwSimt},
    {"ew_few_tokens", EwFewTokens},
    {"ew_sparse24", EwSparse24},
    // Feature-major:
    {"block_wgmma", BlockWgmmaSpmm, true},
    {"ew_wgmma_sparse24", EwWgmmaSparse24, true},
    {"ew_wgmma", EwWgmma, true},
    {"block_fma", BlockFmaSpmm, true},
    {"block_mma_many", BlockMmaManySpmm, true},
    {"block_wgmma_rs", BlockWgmmaRsSpmm, true},
};

inline constexpr Kernel kSpmmTKernels[] = {
    {"simple", SimpleSpmmT},
    {"few_t", FewTokensSpmmT},
    {"block_t_mma", BlockMmaSpmmT},
    // Feature-major:
    {"block_t_wgmma", BlockWgmmaSpmmT, true},
    {"ew_t_wgmma", EwWgmmaSpmmT, true},
};

inline constexpr Kernel kSddmmKernels[] = {
    {"simple", SimpleSddmm},
    // Feature-major:
    {"block_sddmm_wgmma", BlockWgmmaSddmm, true},
    {"ew_sddmm_wgmma", EwWgmmaSddmm, true},
};

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_KERNELS_H_
