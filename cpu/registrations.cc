// jax_nmsparse._cpu: the FFI targets of the CPU, and nothing else.
#include <nanobind/nanobind.h>

#include "cpu/handlers.h"
#include "cpu/isa.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Registrations() {
  nb::dict targets;
  targets["nms_cpu_spmm"] = Capsule(nmsparse::SpmmHandler);
  targets["nms_cpu_spmm_t"] = Capsule(nmsparse::SpmmTHandler);
  targets["nms_cpu_sddmm"] = Capsule(nmsparse::SddmmHandler);
  return targets;
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.def("registrations", &Registrations, "FFI target name -> capsule, for jax.ffi.register_ffi_target.");
  module.def(
      "isa", [] { return nb::str(nmsparse::BestKernels().isa.data()); },
      "The instruction set of the kernels that run here: 'baseline', 'avx2' or 'avx512'.");
}
