// The kept values of one (column, window) in registers, whatever their dtype.
#ifndef JAX_NMSPARSE_CUDA_EW_KEPT_CUH_
#define JAX_NMSPARSE_CUDA_EW_KEPT_CUH_

#include "cuda/ew_common.cuh"

namespace nmsparse::cuda::ew {

__device__ __forceinline__ uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

template <class Value_, int kQ>
struct KeptColumn {
  using Value = Value_;
  static constexpr int kBytes = kQ * static_cast<int>(sizeof(Value));
  // The widest load (bytes, at most 16) to which a column is aligned wherever it begins in `values`.
  static constexpr int kPower = kBytes & -kBytes;
  static constexpr int kLoad = kPower < 16 ? kPower : 16;
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];

  // read(offset) gives the address of byte `offset` of the column; kGlobal: in device memory, through the read-only
  // path.
  template <bool kGlobal, class Read>
  __device__ __forceinline__ void Load(const Read& read) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kLoad) {
      const char* from = read(i);
      if constexpr (kLoad == 16) {
        const uint4 raw = LoadAs<kGlobal, uint4>(from);
        words[i / 4] = raw.x, words[i / 4 + 1] = raw.y, words[i / 4 + 2] = raw.z, words[i / 4 + 3] = raw.w;
      } else if constexpr (kLoad == 8) {
        const uint2 raw = LoadAs<kGlobal, uint2>(from);
        words[i / 4] = raw.x, words[i / 4 + 1] = raw.y;
      } else if constexpr (kLoad == 4) {
        words[i / 4] = LoadAs<kGlobal, uint32_t>(from);
      } else if constexpr (kLoad == 2) {
        const uint32_t raw = LoadAs<kGlobal, uint16_t>(from);
        words[i / 4] = i % 4 == 0 ? raw : words[i / 4] | raw << 16;
      } else {
        const uint32_t raw = LoadAs<kGlobal, uint8_t>(from);
        words[i / 4] = i % 4 == 0 ? raw : words[i / 4] | raw << (i % 4 * 8);
      }
    }
  }

  // Before the first At: one pass over the words where that spares work per value.
  __device__ __forceinline__ void Prepare() {
    if constexpr (std::is_same_v<Value, int8_t>) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] ^= 0x80808080u;  // to 0..255, 128 above the value
    }
  }

  // Value j as float (or int32_t). j is a constant wherever this is unrolled.
  template <class Acc>
  __device__ __forceinline__ Acc At(int j) const {
    if constexpr (std::is_same_v<Value, float>) {
      return __uint_as_float(words[j]);
    } else if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
      return __uint_as_float(j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xffff0000u);
    } else if constexpr (std::is_same_v<Value, __half>) {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16))));
    } else if constexpr (std::is_same_v<Acc, int32_t>) {
      return static_cast<int32_t>(words[j / 4] >> (j % 4 * 8) & 0xffu) - 128;
    } else if constexpr (std::is_same_v<Value, int8_t>) {
      // The float 2^23 + u has the integer u in its low bits: no conversion instruction.
      return __uint_as_float(Permute(words[j / 4], 0x4b000000u, 0x7650u | (j % 4))) - (8388608.0f + 128.0f);
    } else {
      static_assert(std::is_same_v<Value, E4M3>, "a dtype of values");
#if __CUDA_ARCH__ >= 890
      uint32_t pair;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(words[j / 4] >> (j % 4 / 2 * 16))));
      return __half2float(__ushort_as_half(static_cast<uint16_t>(j % 2 == 0 ? pair : pair >> 16)));
#else
      return ToFloat(E4M3{static_cast<uint8_t>(words[j / 4] >> (j % 4 * 8))});
#endif
    }
  }

  // The bits of value j as an X (bfloat16 or float16). int8 and float8 values are exact in both.
  template <class X>
  __device__ __forceinline__ uint16_t Bits(int j) const {
    if constexpr (std::is_same_v<Value, X>) {
      return static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
    } else if constexpr (std::is_same_v<X, __nv_bfloat16>) {
      return static_cast<uint16_t>(__float_as_uint(At<float>(j)) >> 16);
    } else {
      return __half_as_ushort(__float2half_rn(At<float>(j)));
    }
  }

 private:
  template <bool kGlobal, class T>
  static __device__ __forceinline__ T LoadAs(const char* from) {
    if constexpr (kGlobal) return __ldg(reinterpret_cast<const T*>(from));
    return *reinterpret_cast<const T*>(from);
  }
};

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_KEPT_CUH_
