// Vectors of the widest kind that this instruction set has, and loads and stores that convert.
//
// Kernel sources are compiled once per instruction set, with NMS_ISA naming the namespace. Everything in these headers
// has internal linkage, and no standard template is used: a function that two object files define under one name is
// merged by the linker, and the copy that survives could hold instructions that the processor lacks.
//
// GCC's and Clang's vector extensions carry the arithmetic on any architecture; intrinsics appear only where they have
// no equivalent (masked loads, compressions, half floats).
#ifndef JAX_NMSPARSE_CPU_KERNELS_SIMD_H_
#define JAX_NMSPARSE_CPU_KERNELS_SIMD_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/problem.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef NMS_ISA
#error "NMS_ISA names the namespace of this instruction set"
#endif

#define NMS_INLINE inline __attribute__((always_inline))

namespace nmsparse {
namespace NMS_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T, int lanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(lanes * sizeof(T))));
  typedef T Unaligned __attribute__((vector_size(lanes * sizeof(T)), aligned(1), may_alias));
};

template <typename T>
using Vec = typename VectorOf<T, kLanes<T>>::Type;

// Storage types of the half floats.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <typename T>
NMS_INLINE constexpr T Min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
NMS_INLINE constexpr T Max(T a, T b) {
  return a < b ? b : a;
}

NMS_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

NMS_INLINE int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// ---- scalars ----

template <typename To, typename From>
NMS_INLINE To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

NMS_INLINE float ToFloat(BF16 v) { return Bits<float>(static_cast<uint32_t>(v.bits) << 16); }

NMS_INLINE float ToFloat(F16 v) {
#if defined(__F16C__)
  return _cvtsh_ss(v.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return Bits<float>(sign | 0x7f800000u | (rest << 13));
  // Scaling by 2^112 moves the exponent's bias. It would make subnormals normal too, but XLA's threads treat a
  // subnormal float operand as zero.
  const float magnitude = rest < 0x400u ? static_cast<float>(rest) * 0x1p-24f : Bits<float>(rest << 13) * 0x1p112f;
  return Bits<float>(sign | Bits<uint32_t>(magnitude));
#endif
}

NMS_INLINE BF16 ToBF16(float v) {
  const uint32_t bits = Bits<uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

NMS_INLINE F16 ToF16(float v) {
#if defined(__F16C__)
  return {static_cast<uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
#else
  const uint32_t bits = Bits<uint32_t>(v);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds beyond 65504
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the 10 mantissa bits, rounded to nearest even, at the end of the word.
    const float shifted = Bits<float>(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (Bits<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
#endif
}

template <typename Acc>
NMS_INLINE Acc ToAcc(float v) {
  return static_cast<Acc>(v);
}
template <typename Acc>
NMS_INLINE Acc ToAcc(double v) {
  return static_cast<Acc>(v);
}
template <typename Acc>
NMS_INLINE Acc ToAcc(int8_t v) {
  return static_cast<Acc>(v);
}
template <typename Acc>
NMS_INLINE Acc ToAcc(int32_t v) {
  return static_cast<Acc>(v);
}
template <typename Acc>
NMS_INLINE Acc ToAcc(BF16 v) {
  return static_cast<Acc>(ToFloat(v));
}
template <typename Acc>
NMS_INLINE Acc ToAcc(F16 v) {
  return static_cast<Acc>(ToFloat(v));
}

// Rounds a float beyond int32's range to its ends, and NaN to zero, where a plain conversion would be undefined.
template <typename Acc>
NMS_INLINE int32_t ToInt32(Acc v) {
  const double wide = static_cast<double>(v);
  if (!(wide == wide)) return 0;
  if (wide >= 2147483647.0) return 2147483647;
  if (wide <= -2147483648.0) return -2147483647 - 1;
  return static_cast<int32_t>(wide < 0 ? wide - 0.5 : wide + 0.5);
}
template <>
NMS_INLINE int32_t ToInt32<int32_t>(int32_t v) {
  return v;
}

// ---- vectors ----

template <typename T>
NMS_INLINE Vec<T> Load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T, kLanes<T>>::Unaligned*>(p);
}

template <typename T>
NMS_INLINE void Store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VectorOf<T, kLanes<T>>::Unaligned*>(p) = v;
}

template <typename T>
NMS_INLINE Vec<T> Splat(T v) {
  return v - Vec<T>{};
}

#if defined(__AVX512F__)
NMS_INLINE Vec<float> FromBF16(__m256i v) { return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); }
NMS_INLINE __mmask16 First(int64_t count) {
  return static_cast<__mmask16>(_bzhi_u32(0xffffu, static_cast<uint32_t>(count)));
}
#endif

// kLanes<Acc> elements from p, converted.
template <typename Acc, typename T>
NMS_INLINE Vec<Acc> LoadAs(const T* p) {
  if constexpr (sizeof(T) == sizeof(Acc)) {
    return (Vec<Acc>)Load<Acc>(reinterpret_cast<const Acc*>(p));
  } else {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, BF16>) {
      return FromBF16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, F16>) {
      return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, int8_t>) {
      return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    } else if constexpr (std::is_same_v<Acc, int32_t> && std::is_same_v<T, int8_t>) {
      return (Vec<int32_t>)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
#elif defined(__AVX2__)
    if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, BF16>) {
      return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                                           16);
    } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, F16>) {
      return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, int8_t>) {
      return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    } else if constexpr (std::is_same_v<Acc, int32_t> && std::is_same_v<T, int8_t>) {
      return (Vec<int32_t>)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
#endif
    Vec<Acc> v;
    for (int i = 0; i < kLanes<Acc>; ++i) v[i] = ToAcc<Acc>(p[i]);
    return v;
  }
}

// The first `count` lanes from p, zeros after them; reads nothing beyond.
template <typename Acc, typename T>
NMS_INLINE Vec<Acc> LoadFirst(const T* p, int64_t count) {
  if (count >= kLanes<Acc>) return LoadAs<Acc>(p);
#if defined(__AVX512F__)
  const __mmask16 k = First(count);
  if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, float>) {
    return (Vec<float>)_mm512_maskz_loadu_ps(k, p);
  } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, BF16>) {
    return FromBF16(_mm256_maskz_loadu_epi16(k, p));
  } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, F16>) {
    return (Vec<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(k, p));
  } else if constexpr (std::is_same_v<Acc, float> && std::is_same_v<T, int8_t>) {
    return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(k, p)));
  } else if constexpr (std::is_same_v<Acc, int32_t> && std::is_same_v<T, int8_t>) {
    return (Vec<int32_t>)_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(k, p));
  }
#endif
  Vec<Acc> v{};
  for (int64_t i = 0; i < count; ++i) v[i] = ToAcc<Acc>(p[i]);
  return v;
}

template <typename T>
NMS_INLINE void StoreFirst(T* p, Vec<T> v, int64_t count) {
  if (count >= kLanes<T>) return Store(p, v);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_epi32(p, First(count), (__m512i)v);
  if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_epi64(p, static_cast<__mmask8>(First(count)), (__m512i)v);
#endif
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}

// Stores the first `count` lanes at element `index` of an array of `dtype`.
template <typename Acc>
NMS_INLINE void StoreAs(const Result& result, int64_t index, Vec<Acc> v, int64_t count) {
  count = Min<int64_t>(count, kLanes<Acc>);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Acc, float>) {
    if (result.dtype == DType::kBF16) {
      const __m512i bits = (__m512i)v;
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
      const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
      rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
      _mm256_mask_storeu_epi16(static_cast<BF16*>(result.data) + index, First(count), _mm512_cvtepi32_epi16(rounded));
      return;
    }
    if (result.dtype == DType::kF16) {
      _mm256_mask_storeu_epi16(static_cast<F16*>(result.data) + index, First(count),
                               _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      return;
    }
  }
#endif
  switch (result.dtype) {
    case DType::kF32:
      if constexpr (std::is_same_v<Acc, float>) return StoreFirst(static_cast<float*>(result.data) + index, v, count);
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(result.data)[index + i] = static_cast<float>(v[i]);
      return;
    case DType::kF64:
      if constexpr (std::is_same_v<Acc, double>) return StoreFirst(static_cast<double*>(result.data) + index, v, count);
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(result.data)[index + i] = static_cast<double>(v[i]);
      return;
    case DType::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        static_cast<BF16*>(result.data)[index + i] = ToBF16(static_cast<float>(v[i]));
      }
      return;
    case DType::kF16:
      for (int64_t i = 0; i < count; ++i) static_cast<F16*>(result.data)[index + i] = ToF16(static_cast<float>(v[i]));
      return;
    case DType::kS32:
      if constexpr (std::is_same_v<Acc, int32_t>)
        return StoreFirst(static_cast<int32_t*>(result.data) + index, v, count);
      for (int64_t i = 0; i < count; ++i) static_cast<int32_t*>(result.data)[index + i] = ToInt32(v[i]);
      return;
    default:
      return;
  }
}

inline bool IsResult(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16 || dtype == DType::kF16 ||
         dtype == DType::kS32;
}

// ---- shuffles across vectors ----

// One step of a butterfly at distance d: lane l of Low is a[l] or, where bit d of l is set, b[l - d]; lane l of High
// is a[l + d] or b[l].
template <int d, typename V, int... l>
NMS_INLINE V Low(V a, V b, std::integer_sequence<int, l...>) {
  return __builtin_shufflevector(a, b, ((l & d) ? static_cast<int>(sizeof...(l)) + l - d : l)...);
}
template <int d, typename V, int... l>
NMS_INLINE V High(V a, V b, std::integer_sequence<int, l...>) {
  return __builtin_shufflevector(a, b, ((l & d) ? static_cast<int>(sizeof...(l)) + l : l + d)...);
}

// In place: lane i of rows[j] <-> lane j of rows[i].
template <typename T, int d = 1>
NMS_INLINE void Transpose(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (d < kLanes<T>) {
    constexpr std::make_integer_sequence<int, kLanes<T>> lanes;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
      if (i & d) continue;
      const Vec<T> low = Low<d>(rows[i], rows[i + d], lanes), high = High<d>(rows[i], rows[i + d], lanes);
      rows[i] = low;
      rows[i + d] = high;
    }
    Transpose<T, 2 * d>(rows);
  }
}

// Lane i of the result is the sum of all lanes of rows[i].
template <typename T, int d = 1>
NMS_INLINE Vec<T> SumLanes(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (d == kLanes<T>) {
    return rows[0];
  } else {
    constexpr std::make_integer_sequence<int, kLanes<T>> lanes;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; i += 2 * d) {
      rows[i] = Low<d>(rows[i], rows[i + d], lanes) + High<d>(rows[i], rows[i + d], lanes);
    }
    return SumLanes<T, 2 * d>(rows);
  }
}

}  // namespace
}  // namespace NMS_ISA
}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_KERNELS_SIMD_H_
