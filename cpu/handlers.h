#ifndef JAX_NMSPARSE_CPU_HANDLERS_H_
#define JAX_NMSPARSE_CPU_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace nmsparse {

XLA_FFI_DECLARE_HANDLER_SYMBOL(SpmmHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SpmmTHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SddmmHandler);

}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_HANDLERS_H_
