// Element-wise weights and few tokens: kernels that keep a window's positions, not tokens, in the lanes.
#ifndef JAX_NMSPARSE_CPU_KERNELS_FEW_TOKENS_H_
#define JAX_NMSPARSE_CPU_KERNELS_FEW_TOKENS_H_

#include "cpu/isa.h"

namespace nmsparse {
namespace NMS_ISA {

// kUnsupported where these kernels do not take the problem: other patterns, types or numbers of tokens, or an
// instruction set without compressions and permutations over a whole window.
Status SpmmFewTokens(const Problem& problem, Parallel& parallel);
Status SpmmTFewTokens(const Problem& problem, Parallel& parallel);
Status SddmmFewTokens(const Problem& problem, Parallel& parallel);

}  // namespace NMS_ISA
}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_KERNELS_FEW_TOKENS_H_
