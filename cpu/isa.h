// The three operations, with the best kernels that this processor runs.
#ifndef JAX_NMSPARSE_CPU_ISA_H_
#define JAX_NMSPARSE_CPU_ISA_H_

#include <string_view>

#include "common/problem.h"
#include "cpu/parallel.h"

namespace nmsparse {

enum class Status { kOk, kNoMemory, kUnsupported };

struct Kernels {
  std::string_view isa;
  Status (*spmm)(const Problem&, Parallel&);
  Status (*spmm_t)(const Problem&, Parallel&);
  Status (*sddmm)(const Problem&, Parallel&);
};

// The kernels for one instruction set ("baseline", "avx2", "avx512"); null where it was not built or the processor
// does not have it.
const Kernels* KernelsFor(std::string_view isa);

// The widest set that the processor has, or what the environment variable JAX_NMSPARSE_CPU_ISA names, if it can run.
const Kernels& BestKernels();

}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_ISA_H_
