// FFI buffers -> Problem. Everything a kernel relies on is checked here once, for both devices, although Python checked
// it while tracing: a custom call can be built without our Python.
#ifndef JAX_NMSPARSE_COMMON_CHECKS_H_
#define JAX_NMSPARSE_COMMON_CHECKS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/problem.h"
#include "xla/ffi/api/ffi.h"

namespace nmsparse {

namespace ffi = ::xla::ffi;

struct Attributes {
  ffi::Span<const int64_t> pattern;  // window_units, q, bk, bn
  int64_t activation;
  int64_t precision;
  std::string_view kernel;
};

inline std::optional<DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F64:
      return DType::kF64;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F8E4M3FN:
      return DType::kF8E4M3FN;
    case ffi::DataType::S8:
      return DType::kS8;
    case ffi::DataType::S32:
      return DType::kS32;
    default:
      return std::nullopt;
  }
}

// Collects the first thing that is wrong; every check is a no-op after that.
class Checker {
 public:
  explicit Checker(std::string_view op) : op_(op) {}

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }

  void Fail(std::string_view what) {
    if (ok()) message_ = op_ + ": " + std::string(what);
  }

  void Rank(std::string_view name, const ffi::AnyBuffer& buffer, size_t rank) {
    if (buffer.dimensions().size() == rank) return;
    Fail(std::string(name) + " has " + std::to_string(buffer.dimensions().size()) + " axes, expected " +
         std::to_string(rank));
  }

  void Size(std::string_view name, std::string_view axis, int64_t got, int64_t expected, std::string_view because) {
    if (got == expected) return;
    Fail(std::string(name) + " has " + std::string(axis) + " size " + std::to_string(got) + ", expected " +
         std::to_string(expected) + " (= " + std::string(because) + ")");
  }

  DType Type(std::string_view name, const ffi::AnyBuffer& buffer) {
    std::optional<DType> type = ToDType(buffer.element_type());
    if (!type) Fail(std::string(name) + " has a dtype that no kernel reads");
    return type.value_or(DType::kF32);
  }

  Operand Input(std::string_view name, const ffi::AnyBuffer& buffer) {
    return {buffer.untyped_data(), Type(name, buffer)};
  }

 private:
  std::string op_;
  std::string message_;
};

// The weight of a problem whose sizes of batch, in_features and out_features are known. `values` is an operand or, of
// sddmm, the result; `because_batch` says where the batch is from.
inline void CheckStorage(Checker& check, Problem& problem, const ffi::AnyBuffer& values, const ffi::AnyBuffer& mask,
                         const ffi::Span<const int64_t>& pattern, const std::string& because_batch) {
  // One axis: to XLA the order of axes of size one is not fixed, and it has been seen to copy a weight for that.
  check.Rank("values", values, 1);
  check.Rank("mask", mask, 4);
  if (mask.element_type() != ffi::DataType::U32) check.Fail("mask has another dtype than uint32");
  if (pattern.size() != 4) check.Fail("pattern is not (window_units, q, bk, bn)");
  if (!check.ok()) return;
  auto m = mask.dimensions();
  Geometry& geometry = problem.geometry;
  geometry.windows = m[1];
  geometry.out_blocks = m[2];
  geometry.window_units = static_cast<int32_t>(pattern[0]);
  geometry.q = static_cast<int32_t>(pattern[1]);
  geometry.bk = static_cast<int32_t>(pattern[2]);
  geometry.bn = static_cast<int32_t>(pattern[3]);
  geometry.mask_words = static_cast<int32_t>(m[3]);
  check.Size("mask", "batch", m[0], geometry.batch, because_batch);
  if (geometry.window_units < 1 || geometry.window_units > 128) check.Fail("window_units is outside 1 to 128");
  if (geometry.q < 1 || geometry.q > geometry.window_units) check.Fail("q is outside 1 to window_units");
  if (geometry.bk < 1 || geometry.bn < 1) check.Fail("a block has no elements");
  if (!check.ok()) return;
  auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  check.Size("mask", "words", geometry.mask_words, ceil_div(geometry.window_units, 32), "ceil(window_units / 32)");
  check.Size("mask", "windows", geometry.windows, ceil_div(geometry.in_features, geometry.rows_per_window()),
             "ceil(in_features / rows per window)");
  check.Size("mask", "out_blocks", geometry.out_blocks, ceil_div(geometry.out_features, geometry.bn),
             "ceil(out_features / bn)");
  check.Size("values", "total", values.dimensions()[0], geometry.batch * geometry.values_count(),
             "batch * windows * out_blocks * q * bk * bn");
  problem.mask = static_cast<const uint32_t*>(mask.untyped_data());
}

// The part of a problem that the three products share.
inline Problem CheckWeight(Checker& check, const ffi::AnyBuffer& inputs, std::string_view inputs_name,
                           const ffi::AnyBuffer& outputs, std::string_view outputs_name, const ffi::AnyBuffer& values,
                           const ffi::AnyBuffer& mask, const Attributes& attributes) {
  Problem problem;
  check.Rank(inputs_name, inputs, 3);
  check.Rank(outputs_name, outputs, 3);
  if (!check.ok()) return problem;
  auto i = inputs.dimensions(), o = outputs.dimensions();
  Geometry& geometry = problem.geometry;
  geometry.batch = i[0];
  geometry.tokens = i[1];
  geometry.in_features = i[2];
  geometry.out_features = o[2];
  check.Size(outputs_name, "batch", o[0], geometry.batch, std::string(inputs_name) + "'s batch");
  check.Size(outputs_name, "tokens", o[1], geometry.tokens, std::string(inputs_name) + "'s tokens");
  CheckStorage(check, problem, values, mask, attributes.pattern, std::string(inputs_name) + "'s batch");
  if (attributes.precision < 0 || attributes.precision > 2) check.Fail("precision is not one of 0 to 2");
  if (attributes.activation < 0 || attributes.activation > 4) check.Fail("activation is not one of 0 to 4");
  problem.epilogue.activation = static_cast<Activation>(attributes.activation);
  problem.precision = static_cast<Precision>(attributes.precision);
  problem.kernel = attributes.kernel;
  return problem;
}

inline ffi::ErrorOr<Problem> SpmmProblem(const ffi::AnyBuffer& x, const ffi::AnyBuffer& values,
                                         const ffi::AnyBuffer& mask, const ffi::AnyBuffer& scales,
                                         const ffi::AnyBuffer& bias, const ffi::AnyBuffer& y,
                                         const Attributes& attributes) {
  Checker check("spmm");
  Problem problem = CheckWeight(check, x, "x", y, "y", values, mask, attributes);
  problem.x = check.Input("x", x);
  problem.values = check.Input("values", values);
  problem.result = {const_cast<void*>(y.untyped_data()), check.Type("y", y)};
  const Geometry& geometry = problem.geometry;
  const size_t row = static_cast<size_t>(geometry.batch * geometry.out_features);
  if (scales.element_count() != 0) {
    if (scales.element_type() != ffi::DataType::F32) check.Fail("scales has another dtype than float32");
    check.Size("scales", "total", scales.element_count(), row, "batch * out_features");
    problem.epilogue.scales = static_cast<const float*>(scales.untyped_data());
  }
  if (bias.element_count() != 0) {
    check.Size("bias", "total", bias.element_count(), row, "batch * out_features");
    problem.epilogue.bias = check.Input("bias", bias);
  }
  if (!check.ok()) return ffi::Unexpected(check.error());
  return problem;
}

inline ffi::ErrorOr<Problem> SpmmTProblem(const ffi::AnyBuffer& g, const ffi::AnyBuffer& values,
                                          const ffi::AnyBuffer& mask, const ffi::AnyBuffer& dx,
                                          const Attributes& attributes) {
  Checker check("spmm_t");
  Problem problem = CheckWeight(check, dx, "dx", g, "g", values, mask, attributes);
  problem.g = check.Input("g", g);
  problem.values = check.Input("values", values);
  problem.result = {const_cast<void*>(dx.untyped_data()), check.Type("dx", dx)};
  if (!check.ok()) return ffi::Unexpected(check.error());
  return problem;
}

inline ffi::ErrorOr<Problem> SddmmProblem(const ffi::AnyBuffer& x, const ffi::AnyBuffer& g, const ffi::AnyBuffer& mask,
                                          const ffi::AnyBuffer& dv, const Attributes& attributes) {
  Checker check("sddmm");
  Problem problem = CheckWeight(check, x, "x", g, "g", dv, mask, attributes);
  problem.x = check.Input("x", x);
  problem.g = check.Input("g", g);
  problem.result = {const_cast<void*>(dv.untyped_data()), check.Type("dv", dv)};
  if (!check.ok()) return ffi::Unexpected(check.error());
  return problem;
}

// A weight beside its dense form, [batch, in_features, out_features].
inline Problem CheckDense(Checker& check, const ffi::AnyBuffer& values, const ffi::AnyBuffer& mask,
                          const ffi::AnyBuffer& dense, const ffi::Span<const int64_t>& pattern) {
  Problem problem;
  check.Rank("dense", dense, 3);
  if (!check.ok()) return problem;
  auto d = dense.dimensions();
  problem.geometry.batch = d[0];
  problem.geometry.in_features = d[1];
  problem.geometry.out_features = d[2];
  CheckStorage(check, problem, values, mask, pattern, "dense's batch");
  return problem;
}

inline ffi::ErrorOr<Problem> ExpandProblem(const ffi::AnyBuffer& values, const ffi::AnyBuffer& mask,
                                           const ffi::AnyBuffer& dense, const ffi::Span<const int64_t>& pattern) {
  Checker check("expand");
  Problem problem = CheckDense(check, values, mask, dense, pattern);
  problem.values = check.Input("values", values);
  problem.result = {const_cast<void*>(dense.untyped_data()), check.Type("dense", dense)};
  problem.kernel = "expand";
  if (!check.ok()) return ffi::Unexpected(check.error());
  return problem;
}

inline ffi::ErrorOr<Problem> CompressProblem(const ffi::AnyBuffer& dense, const ffi::AnyBuffer& mask,
                                             const ffi::AnyBuffer& values, const ffi::Span<const int64_t>& pattern) {
  Checker check("compress");
  Problem problem = CheckDense(check, values, mask, dense, pattern);
  problem.g = check.Input("dense", dense);
  problem.result = {const_cast<void*>(values.untyped_data()), check.Type("values", values)};
  problem.kernel = "compress";
  if (!check.ok()) return ffi::Unexpected(check.error());
  return problem;
}

}  // namespace nmsparse

#endif  // JAX_NMSPARSE_COMMON_CHECKS_H_
