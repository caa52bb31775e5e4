#include "cpu/isa.h"

#include <cstdlib>

#define NMS_DECLARE(isa)                                \
  namespace isa {                                       \
  Status Spmm(const Problem&, Parallel&);               \
  Status SpmmT(const Problem&, Parallel&);              \
  Status Sddmm(const Problem&, Parallel&);              \
  constexpr Kernels kKernels{#isa, Spmm, SpmmT, Sddmm}; \
  }

namespace nmsparse {

NMS_DECLARE(baseline)
#if defined(NMS_HAVE_avx2)
NMS_DECLARE(avx2)
NMS_DECLARE(avx512)
#endif

const Kernels* KernelsFor(std::string_view isa) {
#if defined(NMS_HAVE_avx2)
  // __builtin_cpu_supports also asks whether the operating system saves the registers.
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (isa == "avx2" && has_avx2) return &avx2::kKernels;
  if (isa == "avx512" && has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2")) {
    return &avx512::kKernels;
  }
#endif
  if (isa == "baseline") return &baseline::kKernels;
  return nullptr;
}

const Kernels& BestKernels() {
  static const Kernels* const best = [] {
    if (const char* wanted = std::getenv("JAX_NMSPARSE_CPU_ISA")) {
      if (const Kernels* kernels = KernelsFor(wanted)) return kernels;
    }
    for (std::string_view isa : {"avx512", "avx2"}) {
      if (const Kernels* kernels = KernelsFor(isa)) return kernels;
    }
    return KernelsFor("baseline");
  }();
  return *best;
}

}  // namespace nmsparse
