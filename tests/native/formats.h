// Host side of the kernel checks: elements of every dtype, read and written.
#ifndef JAX_NMSPARSE_TESTS_NATIVE_FORMATS_H_
#define JAX_NMSPARSE_TESTS_NATIVE_FORMATS_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/problem.h"

namespace nmsparse::check {

struct Format {
  const char* name;
  int bytes;
  double epsilon;  // largest relative error of rounding to nearest
};

inline Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {"f32", 4, 0x1p-24};
    case DType::kF64:
      return {"f64", 8, 0x1p-24};  // stored from a float32 accumulator
    case DType::kF16:
      return {"f16", 2, 0x1p-11};
    case DType::kBF16:
      return {"bf16", 2, 0x1p-8};
    case DType::kF8E4M3FN:
      return {"f8", 1, 0x1p-4};
    case DType::kS8:
      return {"s8", 1, 0};
    case DType::kS32:
      return {"s32", 4, 0};
  }
  return {"unknown", 1, 0};
}

inline double DecodeF8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 128 ? -magnitude : magnitude;
}

template <class T>
void Put(void* to, T v) {
  std::memcpy(to, &v, sizeof(v));
}

template <class T>
T Get(const void* from) {
  T v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline void Encode(DType dtype, double v, void* to) {
  switch (dtype) {
    case DType::kF32:
      return Put(to, static_cast<float>(v));
    case DType::kF64:
      return Put(to, v);
    case DType::kF16:
      return Put(to, __float2half_rn(static_cast<float>(v)));
    case DType::kBF16:
      return Put(to, __float2bfloat16_rn(static_cast<float>(v)));
    case DType::kS8:
      return Put(to, static_cast<int8_t>(std::nearbyint(v)));
    case DType::kS32:
      return Put(to, static_cast<int32_t>(std::nearbyint(v)));
    case DType::kF8E4M3FN: {  // the nearest of all; only small multiples of 1/4 come here, so there are no ties
      static const std::vector<double> table = [] {
        std::vector<double> all;
        for (int bits = 0; bits < 256; ++bits) all.push_back(DecodeF8(bits));
        return all;
      }();
      int best = 0;
      for (int bits = 0; bits < 256; ++bits) best = std::abs(table[bits] - v) < std::abs(table[best] - v) ? bits : best;
      return Put(to, static_cast<uint8_t>(best));
    }
  }
}

inline double Decode(DType dtype, const void* from) {
  switch (dtype) {
    case DType::kF32:
      return Get<float>(from);
    case DType::kF64:
      return Get<double>(from);
    case DType::kF16:
      return __half2float(Get<__half>(from));
    case DType::kBF16:
      return __bfloat162float(Get<__nv_bfloat16>(from));
    case DType::kF8E4M3FN:
      return DecodeF8(Get<uint8_t>(from));
    case DType::kS8:
      return Get<int8_t>(from);
    case DType::kS32:
      return Get<int32_t>(from);
  }
  return 0;
}

}  // namespace nmsparse::check

#endif  // JAX_NMSPARSE_TESTS_NATIVE_FORMATS_H_
