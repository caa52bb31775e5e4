// 8-bit weights as operands of 16-bit tensor cores: pairs of elements below each other, exactly.
#ifndef JAX_NMSPARSE_CUDA_NARROW_WEIGHTS_CUH_
#define JAX_NMSPARSE_CUDA_NARROW_WEIGHTS_CUH_

#include "cuda/device.cuh"

namespace nmsparse::cuda {

// A pair of T, and the constants of the conversions below.
template <class T>
struct PairOf;

template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  // float8_e4m3fn read as bfloat16: its fields end 4 bits below the top, and the exponent is 2^120 too small.
  static constexpr uint32_t kShift = 4, kFields = 0x07f0;
  static constexpr uint16_t kScale = 0x7b80;     // 2^120
  static constexpr uint16_t kOverflow = 0x7b0c;  // 448 times this is finite, 480 times this is not
};
template <>
struct PairOf<__half> {
  using Type = __half2;
  static constexpr uint32_t kShift = 1, kFields = 0x3f80;
  static constexpr uint16_t kScale = 0x5c00;     // 2^8
  static constexpr uint16_t kOverflow = 0x5890;  // 146
};

__device__ __forceinline__ constexpr uint32_t Twice(uint32_t half) { return half << 16 | half; }

// Byte `element` of two words of 8-bit weights: the first word's in the low half, as T.
//
// int8 to bfloat16: 128 plus its low seven bits is one number, 128 or 256 by its sign another; their difference is it.
// int8 to float16: 1024 + 128 + the number fits the mantissa.
// float8_e4m3fn: its fields moved to those of T, and the exponent corrected by a product, which also makes subnormal
// numbers right. NaN arrives as 480, beyond the largest number 448: a product overflows for it alone, and infinity
// times zero makes it NaN again.
template <class T, class Weight>
__device__ __forceinline__ uint32_t WidenPair(uint32_t low, uint32_t high, int element) {
  using Of = PairOf<T>;
  using Pair = typename Of::Type;
  // The byte in both bytes of its half.
  const uint32_t bytes = __byte_perm(low, high, 0x4400 + element * 0x1111);
  if constexpr (std::is_same_v<Weight, E4M3>) {
    const uint32_t fields = (bytes >> Of::kShift & Twice(Of::kFields)) | (bytes & 0x80008000u);
    const Pair value = __hmul2(FromBits<Pair>(fields), FromBits<Pair>(Twice(Of::kScale)));
    const Pair overflow = __hmul2(value, FromBits<Pair>(Twice(Of::kOverflow)));
    return Bits(__hfma2(overflow, FromBits<Pair>(0), value));
  } else if constexpr (std::is_same_v<T, __half>) {
    return Bits(__hsub2(FromBits<Pair>((bytes & 0x00ff00ffu) ^ 0x64806480u), FromBits<Pair>(Twice(0x6480))));
  } else {
    return Bits(__hsub2(FromBits<Pair>((bytes & 0x007f007fu) | 0x43004300u),
                        FromBits<Pair>((bytes & 0x00800080u) | 0x43004300u)));
  }
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_NARROW_WEIGHTS_CUH_
