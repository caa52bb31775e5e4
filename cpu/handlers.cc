// FFI handlers: check the buffers, build a Problem, run it on XLA's intra-op pool. They return errors and never throw.
#include "cpu/handlers.h"

#include "common/checks.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace nmsparse {
namespace {

ffi::Error Run(const char* op, Status (*kernel)(const Problem&, Parallel&), const ffi::ErrorOr<Problem>& problem,
               ffi::ThreadPool pool) {
  if (!problem.has_value()) return problem.error();
  // One family today, which chooses among its kernels by shape. A name that it does not know is an error, so that
  // nobody measures another kernel than the one asked for.
  if (problem->kernel != "simd" && !problem->kernel.empty()) {
    return ffi::Error::InvalidArgument(std::string(op) + ": there is no CPU kernel '" + std::string(problem->kernel) +
                                       "' (there is 'simd')");
  }
  PoolParallel parallel(pool);
  switch (kernel(*problem, parallel)) {
    case Status::kOk:
      return ffi::Error::Success();
    case Status::kNoMemory:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(op) + ": no memory for the kernel's scratch");
    case Status::kUnsupported:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    std::string(op) +
                        ": the CPU kernels take (float32, float32), (bfloat16, bfloat16), (float16, float16), "
                        "(float64, float64) and (int8, int8), and float32, bfloat16 or float16 with int8 weights");
}

ffi::Error Spmm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer mask,
                ffi::AnyBuffer scales, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                ffi::Span<const int64_t> pattern, int64_t activation, int64_t precision, std::string_view kernel) {
  return Run("spmm", BestKernels().spmm,
             SpmmProblem(x, values, mask, scales, bias, *y, {pattern, activation, precision, kernel}), pool);
}

ffi::Error SpmmT(ffi::ThreadPool pool, ffi::AnyBuffer g, ffi::AnyBuffer values, ffi::AnyBuffer mask,
                 ffi::Result<ffi::AnyBuffer> dx, ffi::Span<const int64_t> pattern, int64_t activation,
                 int64_t precision, std::string_view kernel) {
  return Run("spmm_t", BestKernels().spmm_t,
             SpmmTProblem(g, values, mask, *dx, {pattern, activation, precision, kernel}), pool);
}

ffi::Error Sddmm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer g, ffi::AnyBuffer mask,
                 ffi::Result<ffi::AnyBuffer> dv, ffi::Span<const int64_t> pattern, int64_t activation,
                 int64_t precision, std::string_view kernel) {
  return Run("sddmm", BestKernels().sddmm, SddmmProblem(x, g, mask, *dv, {pattern, activation, precision, kernel}),
             pool);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmHandler, Spmm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Arg<ffi::AnyBuffer>()  // scales
                                  .Arg<ffi::AnyBuffer>()  // bias
                                  .Ret<ffi::AnyBuffer>()  // y
                                  .Attr<ffi::Span<const int64_t>>("pattern")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("precision")
                                  .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmTHandler, SpmmT,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // g
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Ret<ffi::AnyBuffer>()  // dx
                                  .Attr<ffi::Span<const int64_t>>("pattern")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("precision")
                                  .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SddmmHandler, Sddmm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // g
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Ret<ffi::AnyBuffer>()  // dv
                                  .Attr<ffi::Span<const int64_t>>("pattern")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("precision")
                                  .Attr<std::string_view>("kernel"));

}  // namespace nmsparse
