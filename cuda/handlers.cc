// FFI handlers: check the buffers, build a Problem, look up the kernel that was named, launch it on the passed stream.
// They return errors and never throw; they neither allocate device memory nor synchronise, so XLA may capture them into
// a CUDA graph and replay it without them.
#include "cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <string>

#include "common/checks.h"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF8E4M3FN:
      return "float8_e4m3fn";
    case DType::kS8:
      return "int8";
    case DType::kS32:
      return "int32";
  }
  return "unknown";
}

bool IsFloat(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; }

bool IsQuantized(DType dtype) { return dtype == DType::kS8 || dtype == DType::kF8E4M3FN; }

// The dtypes that one operation takes.
struct Dtypes {
  bool supported;
  std::string got;
  const char* expected;
};

Dtypes SpmmDtypes(const Problem& problem) {
  const DType x = problem.x.dtype, values = problem.values.dtype;
  return {
      x == values ? IsFloat(x) || IsQuantized(x) : IsFloat(x) && IsQuantized(values),
      std::string("x ") + Name(x) + " with values " + Name(values),
      "x and values both float32, bfloat16, float16, int8 or float8_e4m3fn, or a float32, bfloat16 or float16 x with "
      "int8 or float8_e4m3fn values"};
}

Dtypes SpmmTDtypes(const Problem& problem) {
  const DType g = problem.g.dtype, values = problem.values.dtype;
  return {IsFloat(g) && (values == g || IsQuantized(values)),
          std::string("g ") + Name(g) + " with values " + Name(values),
          "a float32, bfloat16 or float16 g with values of the same dtype, int8 or float8_e4m3fn"};
}

Dtypes SddmmDtypes(const Problem& problem) {
  const DType x = problem.x.dtype, g = problem.g.dtype;
  return {IsFloat(x) && g == x, std::string("x ") + Name(x) + " with g " + Name(g),
          "x and g both float32, bfloat16 or float16"};
}

bool IsResult(DType dtype) { return IsFloat(dtype) || dtype == DType::kF64 || dtype == DType::kS32; }

ffi::Error LaunchError(const std::string& op, const Problem& problem, cudaError_t status) {
  const std::string kernel = "kernel '" + std::string(problem.kernel) + "'";
  switch (status) {
    case cudaErrorNotSupported: {
      const Geometry& geometry = problem.geometry;
      return ffi::Error(ffi::ErrorCode::kUnimplemented,
                        op + ": " + kernel + " does not take this problem: " + std::to_string(geometry.tokens) +
                            " tokens, in_features " + std::to_string(geometry.in_features) + ", out_features " +
                            std::to_string(geometry.out_features) + ", " + std::to_string(geometry.q) + " of " +
                            std::to_string(geometry.window_units) + " units kept, block " +
                            std::to_string(geometry.bk) + "x" + std::to_string(geometry.bn) + ", result " +
                            Name(problem.result.dtype) + ", workspace of " + std::to_string(problem.workspace_bytes) +
                            " bytes; choose kernel 'simple'");
    }
    case cudaErrorInvalidDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return ffi::Error(ffi::ErrorCode::kUnimplemented,
                        op + ": " + kernel + " has no code for this device (" + cudaGetErrorName(status) +
                            "); this module was built for " NMS_CUDA_ARCHITECTURES
                            ": rebuild it with JAX_NMSPARSE_CUDA_ARCHITECTURES, or use implementation=\"xla\"");
    default:
      return ffi::Error(ffi::ErrorCode::kInternal, op + ": launching " + kernel +
                                                       " failed: " + cudaGetErrorName(status) + " (" +
                                                       cudaGetErrorString(status) + ")");
  }
}

ffi::Error Launched(const std::string& op, const Problem& problem, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // reported here: not left behind for the next caller of the runtime
  return LaunchError(op, problem, status);
}

template <size_t kCount>
ffi::Error Run(const std::string& op, const Kernel (&kernels)[kCount], Dtypes (*dtypes)(const Problem&),
               ffi::ErrorOr<Problem> checked, ffi::AnyBuffer& workspace, cudaStream_t stream) {
  if (!checked.has_value()) return checked.error();
  Problem problem = *checked;
  problem.workspace = workspace.untyped_data();
  problem.workspace_bytes = static_cast<int64_t>(workspace.size_bytes());

  const Dtypes pair = dtypes(problem);
  if (!pair.supported) {
    return ffi::Error::InvalidArgument(op + ": got " + pair.got + ", expected " + pair.expected + " on a CUDA device");
  }
  if (!IsResult(problem.result.dtype)) {
    return ffi::Error::InvalidArgument(op + ": got a result of " + Name(problem.result.dtype) +
                                       ", expected float32, bfloat16, float16, float64 or int32");
  }

  for (const Kernel& kernel : kernels) {
    if (kernel.name != problem.kernel) continue;
    return Launched(op, problem, kernel.launch(problem, stream));
  }
  std::string known;
  for (const Kernel& kernel : kernels) known += (known.empty() ? "" : ", ") + std::string(kernel.name);
  return ffi::Error::InvalidArgument(op + ": got kernel '" + std::string(problem.kernel) + "', expected one of " +
                                     known);
}

ffi::Error Spmm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer mask,
                ffi::AnyBuffer scales, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                ffi::Result<ffi::AnyBuffer> workspace, ffi::Span<const int64_t> pattern, int64_t activation,
                int64_t precision, std::string_view kernel) {
  return Run("spmm", kSpmmKernels, SpmmDtypes,
             SpmmProblem(x, values, mask, scales, bias, *y, {pattern, activation, precision, kernel}), *workspace,
             stream);
}

ffi::Error SpmmT(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer values, ffi::AnyBuffer mask,
                 ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> workspace,
                 ffi::Span<const int64_t> pattern, int64_t activation, int64_t precision, std::string_view kernel) {
  return Run("spmm_t", kSpmmTKernels, SpmmTDtypes,
             SpmmTProblem(g, values, mask, *dx, {pattern, activation, precision, kernel}), *workspace, stream);
}

ffi::Error Sddmm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer g, ffi::AnyBuffer mask,
                 ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> workspace,
                 ffi::Span<const int64_t> pattern, int64_t activation, int64_t precision, std::string_view kernel) {
  return Run("sddmm", kSddmmKernels, SddmmDtypes,
             SddmmProblem(x, g, mask, *dv, {pattern, activation, precision, kernel}), *workspace, stream);
}

ffi::Error ExpandWeight(cudaStream_t stream, ffi::AnyBuffer values, ffi::AnyBuffer mask,
                        ffi::Result<ffi::AnyBuffer> dense, ffi::Span<const int64_t> pattern) {
  const ffi::ErrorOr<Problem> problem = ExpandProblem(values, mask, *dense, pattern);
  if (!problem.has_value()) return problem.error();
  const DType from = problem->values.dtype, to = problem->result.dtype;
  if (!(from == to && (IsFloat(to) || IsQuantized(to))) && !(IsQuantized(from) && IsFloat(to))) {
    return ffi::Error::InvalidArgument(std::string("expand: got values ") + Name(from) + " and dense " + Name(to) +
                                       ", expected one of float32, bfloat16, float16, int8 and float8_e4m3fn for both, "
                                       "or a float for values of int8 or float8_e4m3fn");
  }
  return Launched("expand", *problem, Expand(*problem, stream));
}

ffi::Error CompressDense(cudaStream_t stream, ffi::AnyBuffer dense, ffi::AnyBuffer mask,
                         ffi::Result<ffi::AnyBuffer> values, ffi::Span<const int64_t> pattern) {
  const ffi::ErrorOr<Problem> problem = CompressProblem(dense, mask, *values, pattern);
  if (!problem.has_value()) return problem.error();
  const DType from = problem->g.dtype, to = problem->result.dtype;
  if (from != to || !IsFloat(to)) {
    return ffi::Error::InvalidArgument(std::string("compress: got dense ") + Name(from) + " and values " + Name(to) +
                                       ", expected one of float32, bfloat16 and float16 for both");
  }
  return Launched("compress", *problem, Compress(*problem, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCompressHandler, CompressDense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // dense
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Ret<ffi::AnyBuffer>()  // values
                                  .Attr<ffi::Span<const int64_t>>("pattern"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaExpandHandler, ExpandWeight,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Ret<ffi::AnyBuffer>()  // dense
                                  .Attr<ffi::Span<const int64_t>>("pattern"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaSpmmHandler, Spmm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Arg<ffi::AnyBuffer>()  // scales
                                  .Arg<ffi::AnyBuffer>()  // bias
                                  .Ret<ffi::AnyBuffer>()  // y
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<ffi::Span<const int64_t>>("pattern")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("precision")
                                  .Attr<std::string_view>("kernel"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaSpmmTHandler, SpmmT,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // g
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Ret<ffi::AnyBuffer>()  // dx
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<ffi::Span<const int64_t>>("pattern")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("precision")
                                  .Attr<std::string_view>("kernel"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaSddmmHandler, Sddmm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // g
                                  .Arg<ffi::AnyBuffer>()  // mask
                                  .Ret<ffi::AnyBuffer>()  // dv
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<ffi::Span<const int64_t>>("pattern")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("precision")
                                  .Attr<std::string_view>("kernel"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace nmsparse::cuda
