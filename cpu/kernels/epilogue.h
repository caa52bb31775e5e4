// act(v * scales + bias) on vectors of one token's consecutive columns.
#ifndef JAX_NMSPARSE_CPU_KERNELS_EPILOGUE_H_
#define JAX_NMSPARSE_CPU_KERNELS_EPILOGUE_H_

#include <cmath>

#include "cpu/kernels/simd.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

// e^v with a relative error below 2e-7; infinite beyond 88.37, zero-like below -87.
NMS_INLINE Vec<float> Exp(Vec<float> v) {
  typedef int32_t VecI __attribute__((vector_size(kVectorBytes)));
  v = v > 88.5f ? Splat(88.5f) : v;
  v = v < -87.0f ? Splat(-87.0f) : v;
  // v = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to an integer.
  const Vec<float> shifted = v * 1.44269504f + 12582912.0f;
  const Vec<float> n = shifted - 12582912.0f;
  const Vec<float> r = (v - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec<float> p = Splat(0.00138294206f);
  p = p * r + 0.00837477152f;
  p = p * r + 0.041668358f;
  p = p * r + 0.166664208f;
  p = p * r + 0.499999915f;
  p = p * r + 1.00000004f;
  p = p * r + 1.0f;
  const VecI exponent = ((VecI)shifted - 0x4b400000 + 127) << 23;
  return p * (Vec<float>)exponent;
}

NMS_INLINE Vec<float> Sigmoid(Vec<float> v) { return 1.0f / (1.0f + Exp(-v)); }

// The standard normal distribution function, erfc(-v / sqrt 2) / 2, accurate in its lower tail too:
// erfc(a) = e^(-a a) t P(t) with t = 3 / (3 + a); P is a least-squares fit (relative error 2e-9) for a below 10.
NMS_INLINE Vec<float> NormalCdf(Vec<float> v) {
  Vec<float> a = (v < 0.0f ? -v : v) * 0.707106781f;
  a = a > 10.0f ? Splat(10.0f) : a;
  const Vec<float> t = 3.0f / (3.0f + a);
  Vec<float> p = Splat(0.0560610025f);
  p = p * t - 0.293947596f;
  p = p * t + 0.539812026f;
  p = p * t - 0.446447056f;
  p = p * t + 0.40776671f;
  p = p * t - 0.00415235966f;
  p = p * t + 0.192904599f;
  p = p * t + 0.171261766f;
  p = p * t + 0.188706237f;
  p = p * t + 0.188034673f;
  const Vec<float> tail = 0.5f * Exp(-a * a) * t * p;
  return v < 0.0f ? tail : 1.0f - tail;
}

NMS_INLINE Vec<float> Activate(Vec<float> v, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0.0f ? Vec<float>{} : v;  // NaN stays
    case Activation::kGelu:
      return v * NormalCdf(v);
    case Activation::kGeluTanh:
      // (1 + tanh u) / 2 = sigmoid(2 u)
      return v * Sigmoid(v * (1.59576912f + 0.0713548163f * v * v));
    case Activation::kSilu:
      return v * Sigmoid(v);
  }
  return v;
}

NMS_INLINE Vec<double> Activate(Vec<double> v, Activation activation) {
  for (int i = 0; i < kLanes<double>; ++i) {
    const double x = v[i];
    switch (activation) {
      case Activation::kNone:
        break;
      case Activation::kRelu:
        v[i] = x < 0 ? 0 : x;
        break;
      case Activation::kGelu:
        v[i] = 0.5 * x * ::erfc(-x * 0.70710678118654752440);
        break;
      case Activation::kGeluTanh:
        v[i] = x / (1 + ::exp(-2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x)));
        break;
      case Activation::kSilu:
        v[i] = x / (1 + ::exp(-x));
        break;
    }
  }
  return v;
}

template <typename F>
NMS_INLINE Vec<F> LoadBias(const Operand& bias, int64_t index, int64_t count) {
  switch (bias.dtype) {
    case DType::kF32:
      return LoadFirst<F>(static_cast<const float*>(bias.data) + index, count);
    case DType::kF64:
      return LoadFirst<F>(static_cast<const double*>(bias.data) + index, count);
    case DType::kBF16:
      return LoadFirst<F>(static_cast<const BF16*>(bias.data) + index, count);
    case DType::kF16:
      return LoadFirst<F>(static_cast<const F16*>(bias.data) + index, count);
    case DType::kS32:
      return LoadFirst<F>(static_cast<const int32_t*>(bias.data) + index, count);
    default:
      return Vec<F>{};
  }
}

// Stores columns [column, column + count) of row `row` (= batch * tokens + token) of y.
template <typename Acc>
NMS_INLINE void StoreColumns(const Problem& problem, int64_t batch, int64_t row, int64_t column, Vec<Acc> v,
                             int64_t count) {
  const Epilogue& epilogue = problem.epilogue;
  const int64_t out = problem.geometry.out_features;
  const int64_t index = row * out + column;
  if constexpr (std::is_same_v<Acc, int32_t>) {
    if (epilogue.scales || epilogue.bias.data || epilogue.activation != Activation::kNone) {
      const Vec<float> f = __builtin_convertvector(v, Vec<float>);
      return StoreColumns<float>(problem, batch, row, column, f, count);
    }
  } else {
    if (epilogue.scales) v *= LoadFirst<Acc>(epilogue.scales + batch * out + column, count);
    if (epilogue.bias.data) v += LoadBias<Acc>(epilogue.bias, batch * out + column, count);
    if (epilogue.activation != Activation::kNone) v = Activate(v, epilogue.activation);
  }
  StoreAs<Acc>(problem.result, index, v, count);
}

}  // namespace
}  // namespace NMS_ISA
}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_KERNELS_EPILOGUE_H_
