#ifndef JAX_NMSPARSE_CUDA_HANDLERS_H_
#define JAX_NMSPARSE_CUDA_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace nmsparse::cuda {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaSpmmHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaSpmmTHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaSddmmHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaExpandHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaCompressHandler);

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_HANDLERS_H_
