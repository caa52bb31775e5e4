// What one call computes, free of XLA: the plain description that the FFI handlers build from their buffers and
// that every kernel launcher, CPU or CUDA, reads.
//
//   spmm    y  [batch, tokens, out_features]            = act((x W) * scales + bias)
//   spmm_t  dx [batch, tokens, in_features]             = g Wᵀ
//   sddmm   dv [batch, windows, out_blocks, q, bk, bn]  = (xᵀ g) at the kept units
//
// W has shape [in_features, out_features] and is stored as
//   values [batch, windows, out_blocks, q, bk, bn]  kept units, ascending position inside their window
//   mask   [batch, windows, out_blocks, words]      bit u of word v: unit 32 * v + u of the window is kept
// A window is `window_units` consecutive units (32, or the group size m where m does not divide 32); a unit is a
// bk x bn tile. Unit u of window w covers rows (w * window_units + u) * bk ... + bk - 1 of W. Rows beyond
// in_features and columns beyond out_features are padding: read as zero, never written in y and dx, zero in dv.
#ifndef JAX_NMSPARSE_COMMON_PROBLEM_H_
#define JAX_NMSPARSE_COMMON_PROBLEM_H_

#include <cstdint>
#include <string_view>

namespace nmsparse {

enum class DType : int32_t { kF32, kF64, kF16, kBF16, kF8E4M3FN, kS8, kS32 };

enum class Activation : int32_t { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

// Of float32 operands: TF32 allowed; as good as three products of TF32 halves; float32 itself. FLOAT32 in kernels.py.
enum class Precision : int32_t { kDefault = 0, kTf32x3 = 1, kHighest = 2 };

struct Geometry {
  int64_t batch = 0;
  int64_t tokens = 0;
  int64_t in_features = 0;
  int64_t out_features = 0;
  int64_t windows = 0;
  int64_t out_blocks = 0;
  int32_t q = 0;
  int32_t bk = 0;
  int32_t bn = 0;
  int32_t window_units = 0;
  int32_t mask_words = 0;

  int64_t rows_per_window() const { return int64_t{window_units} * bk; }
  // Elements of `values` and words of `mask` per batch entry.
  int64_t values_count() const { return windows * out_blocks * q * bk * bn; }
  int64_t mask_count() const { return windows * out_blocks * mask_words; }
};

struct Operand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
};

struct Result {
  void* data = nullptr;
  DType dtype = DType::kF32;
};

// Applied in this order to an accumulator before it is rounded to the result's dtype; absent parts have null data.
struct Epilogue {
  const float* scales = nullptr;  // [batch, out_features]
  Operand bias;                   // [batch, out_features]
  Activation activation = Activation::kNone;
};

struct Problem {
  Geometry geometry;
  Operand x;       // spmm, sddmm: [batch, tokens, in_features]
  Operand g;       // spmm_t, sddmm: [batch, tokens, out_features]
  Operand values;  // spmm, spmm_t
  const uint32_t* mask = nullptr;
  Epilogue epilogue;  // spmm only
  Result result;      // y, dx or dv
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  Precision precision = Precision::kDefault;
  std::string_view kernel;  // the kernel that dispatch.py chose
};

}  // namespace nmsparse

#endif  // JAX_NMSPARSE_COMMON_PROBLEM_H_
