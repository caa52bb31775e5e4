// jax_nmsparse._cuda: the FFI targets of CUDA devices, and nothing else.
#include <nanobind/nanobind.h>

#include "cuda/handlers.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Registrations() {
  nb::dict targets;
  targets["nms_cuda_spmm"] = Capsule(nmsparse::cuda::CudaSpmmHandler);
  targets["nms_cuda_spmm_t"] = Capsule(nmsparse::cuda::CudaSpmmTHandler);
  targets["nms_cuda_sddmm"] = Capsule(nmsparse::cuda::CudaSddmmHandler);
  targets["nms_cuda_expand"] = Capsule(nmsparse::cuda::CudaExpandHandler);
  targets["nms_cuda_compress"] = Capsule(nmsparse::cuda::CudaCompressHandler);
  return targets;
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.def("registrations", &Registrations, "FFI target name -> capsule, for jax.ffi.register_ffi_target.");
  module.attr("architectures") = NMS_CUDA_ARCHITECTURES;
}
