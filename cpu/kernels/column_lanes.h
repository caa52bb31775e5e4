// Weights whose units are several columns wide: kernels that keep columns, not tokens, in the lanes.
#ifndef JAX_NMSPARSE_CPU_KERNELS_COLUMN_LANES_H_
#define JAX_NMSPARSE_CPU_KERNELS_COLUMN_LANES_H_

#include "cpu/isa.h"

namespace nmsparse {
namespace NMS_ISA {

// kUnsupported where these kernels do not take the problem, or the ones with tokens in lanes are faster.
Status SpmmColumnLanes(const Problem& problem, Parallel& parallel);
Status SpmmTColumnLanes(const Problem& problem, Parallel& parallel);
Status SddmmColumnLanes(const Problem& problem, Parallel& parallel);

}  // namespace NMS_ISA
}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_KERNELS_COLUMN_LANES_H_
