// Device helpers shared by the kernel families: dtypes, loads with tails, the mask, the epilogue, stores.
//
// Dtypes are run-time values here (a branch that the whole grid takes the same way), so that a kernel whose speed does
// not hang on it needs one instance for all of them: WithInputType(dtype, [&](auto zero) { using T = decltype(zero);
// }).
#ifndef JAX_NMSPARSE_CUDA_DEVICE_CUH_
#define JAX_NMSPARSE_CUDA_DEVICE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/problem.h"

namespace nmsparse::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaskBits = 32;
// Largest grid along x. Blocks walk their tiles with a stride of gridDim.x, so more tiles than this are legal.
inline constexpr int64_t kMaxBlocks = 0x7fffffff;

__host__ __device__ constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline unsigned GridSize(int64_t tiles) { return static_cast<unsigned>(tiles < kMaxBlocks ? tiles : kMaxBlocks); }

// ---------------------------------------------------------------------------------------------------------- dtypes

// float8_e4m3fn: 4 exponent bits of bias 7, 3 mantissa bits, no infinity, NaN at all ones.
struct E4M3 {
  uint8_t bits;
};

__device__ __forceinline__ float ToFloat(float v) { return v; }
__device__ __forceinline__ float ToFloat(double v) { return static_cast<float>(v); }
__device__ __forceinline__ float ToFloat(__half v) { return __half2float(v); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float ToFloat(int8_t v) { return static_cast<float>(v); }
__device__ __forceinline__ float ToFloat(int32_t v) { return static_cast<float>(v); }
__device__ __forceinline__ float ToFloat(E4M3 v) {
  // One place to the right of the sign, the fields of e4m3 read as float16 with an exponent too small by 15 - 7.
  const uint32_t magnitude = v.bits & 0x7fu;
  const float scaled =
      __half2float(__ushort_as_half(static_cast<uint16_t>(((v.bits & 0x80u) << 8) | (magnitude << 7))));
  return magnitude == 0x7fu ? __int_as_float(0x7fffffff) : scaled * 256.0f;
}

// To<T>(v): v rounded to nearest even, saturating for integers.
template <class T>
__device__ __forceinline__ T To(float v);
template <>
__device__ __forceinline__ float To<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ double To<double>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half To<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 To<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ int32_t To<int32_t>(float v) {
  return __float2int_rn(v);
}
template <class T>
__device__ __forceinline__ T To(int32_t v) {
  return To<T>(static_cast<float>(v));
}
template <>
__device__ __forceinline__ int32_t To<int32_t>(int32_t v) {
  return v;
}
template <>
__device__ __forceinline__ double To<double>(int32_t v) {
  return v;
}

// Two numbers as a pair of a dtype: float2, __half2 or __nv_bfloat162.
template <class Pair>
__device__ __forceinline__ Pair RoundPair(float low, float high) {
  if constexpr (std::is_same_v<Pair, float2>) {
    return make_float2(low, high);
  } else if constexpr (std::is_same_v<Pair, __half2>) {
    return __floats2half2_rn(low, high);
  } else {
    static_assert(std::is_same_v<Pair, __nv_bfloat162>, "a pair of float32, float16 or bfloat16");
    return __floats2bfloat162_rn(low, high);
  }
}

// The 32 bits of a pair of 16-bit elements, and the pair of such bits.
template <class Pair>
__device__ __forceinline__ uint32_t Bits(Pair pair) {
  uint32_t bits;
  static_assert(sizeof(pair) == sizeof(bits));
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
template <class Pair>
__device__ __forceinline__ Pair FromBits(uint32_t bits) {
  Pair pair;
  static_assert(sizeof(pair) == sizeof(bits));
  memcpy(&pair, &bits, sizeof(bits));
  return pair;
}

// 16 aligned bytes of shared memory, as a uint4 or float4.
template <class Vector = uint4>
__device__ __forceinline__ Vector LoadShared16(uint32_t address) {
  uint4 bits;
  Vector v;
  static_assert(sizeof(v) == sizeof(bits));
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(address)
               : "memory");
  memcpy(&v, &bits, sizeof(v));
  return v;
}

// An element of x, g or values at the accumulator's type: float, or int32_t where both operands are int8.
template <class Acc, class T>
__device__ __forceinline__ Acc ToAccumulator(T v) {
  return ToFloat(v);
}
template <>
__device__ __forceinline__ int32_t ToAccumulator<int32_t, int8_t>(int8_t v) {
  return v;
}

// Calls f with a zero of the type that x, g or values are stored in. An int32_t accumulator implies int8 operands.
template <class Acc = float, class F>
__device__ __forceinline__ void WithInputType(DType dtype, F&& f) {
  if constexpr (std::is_same_v<Acc, int32_t>) {
    f(int8_t{});
  } else {
    switch (dtype) {
      case DType::kF32:
        return f(float{});
      case DType::kBF16:
        return f(__nv_bfloat16{});
      case DType::kF16:
        return f(__half{});
      case DType::kS8:
        return f(int8_t{});
      case DType::kF8E4M3FN:
        return f(E4M3{});
      default:
        return;
    }
  }
}

// Calls f with a zero of the type that y, dx or dv are stored in.
template <class F>
__device__ __forceinline__ void WithOutputType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(__nv_bfloat16{});
    case DType::kF16:
      return f(__half{});
    case DType::kF64:
      return f(double{});
    case DType::kS32:
      return f(int32_t{});
    default:
      return;
  }
}

// ----------------------------------------------------------------------------------------------------------- loads

// out[i] = source[i] for i < count, zero for the rest. 16-byte loads where the run is whole and its address allows.
template <int kRun, class Acc, class T>
__device__ __forceinline__ void LoadRun(const T* source, int count, Acc (&out)[kRun]) {
  constexpr int kPerVector = 16 / sizeof(T);
  static_assert(kRun % kPerVector == 0, "a run is a whole number of 16-byte vectors for every dtype");
  if (count >= kRun && reinterpret_cast<uintptr_t>(source) % 16 == 0) {
#pragma unroll
    for (int v = 0; v < kRun / kPerVector; ++v) {
      const uint4 raw = reinterpret_cast<const uint4*>(source)[v];
      T part[kPerVector];
      static_assert(sizeof(part) == sizeof(raw));
      memcpy(part, &raw, sizeof(raw));
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) out[v * kPerVector + i] = ToAccumulator<Acc>(part[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) out[i] = i < count ? ToAccumulator<Acc>(source[i]) : Acc(0);
  }
}

// One element whatever its dtype: for operands read once, such as the bias.
__device__ __forceinline__ float LoadAsFloat(const Operand& operand, int64_t index) {
  float value = 0.0f;
  if (operand.dtype == DType::kF64) return ToFloat(static_cast<const double*>(operand.data)[index]);
  if (operand.dtype == DType::kS32) return ToFloat(static_cast<const int32_t*>(operand.data)[index]);
  WithInputType(operand.dtype,
                [&](auto zero) { value = ToFloat(static_cast<const decltype(zero)*>(operand.data)[index]); });
  return value;
}

// ------------------------------------------------------------------------------------------------------------ mask

// The kept rows of a column inside one window are stored in ascending order, `bn` elements apart:
//   element j of the list (j < q * bk) lies at values[window, block, 0, 0, column in block] + j * bn.
// A row tile is up to 32 consecutive rows of one window; this is what one column keeps of it.
struct KeptRows {
  uint32_t bits;  // bit i: row first_row + i of the window is kept
  int32_t first;  // index in the column's list of the lowest kept row of the tile; first + popc(bits) <= q * bk
};

// `words`: the mask words of one (window, block); `first_row`: a multiple of 32 below the rows of a window.
// Bits beyond the q-th, or beyond window_units, are ignored: a corrupt mask never leads outside the list.
__device__ __forceinline__ KeptRows FindKeptRows(const Geometry& geometry, const uint32_t* words, int32_t first_row) {
  if (geometry.bk == 1) {
    const int32_t word = first_row / kMaskBits;
    int32_t rank = 0;
    for (int32_t i = 0; i < word; ++i) rank += __popc(words[i]);
    uint32_t bits = words[word];
    const int32_t units = geometry.window_units - first_row;
    if (units < kMaskBits) bits &= (1u << units) - 1;
    rank = min(rank, geometry.q);
    for (int32_t surplus = __popc(bits) - (geometry.q - rank); surplus > 0; --surplus) bits ^= 1u << (31 - __clz(bits));
    return {bits, rank};
  }
  int32_t unit = first_row / geometry.bk;
  int32_t row = unit * geometry.bk - first_row;  // first row of the unit, relative to the tile; not positive at first
  int32_t rank = 0;
  for (int32_t i = 0; i < unit / kMaskBits; ++i) rank += __popc(words[i]);
  if (unit % kMaskBits != 0) rank += __popc(words[unit / kMaskBits] & ((1u << unit % kMaskBits) - 1));
  rank = min(rank, geometry.q);
  KeptRows kept{0, rank * geometry.bk};
  for (bool first = true; row < kMaskBits && unit < geometry.window_units && rank < geometry.q; ++unit) {
    if (words[unit / kMaskBits] >> unit % kMaskBits & 1) {
      const int32_t begin = max(row, 0), end = min(row + geometry.bk, kMaskBits);
      kept.bits |= (0xffffffffu << begin) & (0xffffffffu >> (kMaskBits - end));
      if (first) kept.first += begin - row;  // the unit began in an earlier tile
      ++rank;
    }
    first = false;
    row += geometry.bk;
  }
  return kept;
}

// Window and first row of a row tile, counted over the whole in_features axis.
struct RowTile {
  int64_t window;
  int32_t first_row;  // inside the window
  int32_t rows;       // rows of the tile inside both the window and in_features; may be 0
  int64_t k;          // first row of W
};

__host__ __device__ inline int64_t RowTilesPerWindow(const Geometry& geometry) {
  return CeilDiv(int64_t{geometry.window_units} * geometry.bk, kMaskBits);
}

__host__ __device__ inline int64_t RowTiles(const Geometry& geometry) {
  return geometry.windows * RowTilesPerWindow(geometry);
}

__device__ __forceinline__ RowTile RowTileAt(const Geometry& geometry, int32_t tile) {
  const int32_t rows_per_window = geometry.window_units * geometry.bk;
  RowTile result{tile, 0, rows_per_window, 0};
  if (rows_per_window > kMaskBits) {
    const int32_t per_window = (rows_per_window + kMaskBits - 1) / kMaskBits;
    result.window = tile / per_window;
    result.first_row = (tile - static_cast<int32_t>(result.window) * per_window) * kMaskBits;
    result.rows = min(kMaskBits, rows_per_window - result.first_row);
  }
  result.k = result.window * rows_per_window + result.first_row;
  result.rows = static_cast<int32_t>(max(int64_t{0}, min(int64_t{result.rows}, geometry.in_features - result.k)));
  return result;
}

// ------------------------------------------------------------------------------------------------ epilogue, stores

// The same expressions as jax.nn, NaN included.
__device__ __forceinline__ float Activate(Activation activation, float v) {
  switch (activation) {
    case Activation::kRelu:
      return v <= 0.0f ? 0.0f : v;
    case Activation::kGelu:
      return 0.5f * v * erfcf(-v * 0.70710678118654752f);
    case Activation::kGeluTanh:
      return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * (v + 0.044715f * (v * v * v))));
    case Activation::kSilu:
      return v / (1.0f + expf(-v));
    default:
      return v;
  }
}

// `feature`: batch entry * out_features + column, the index into scales and bias.
__device__ __forceinline__ float ApplyEpilogue(const Epilogue& epilogue, int64_t feature, float v) {
  if (epilogue.scales != nullptr) v *= epilogue.scales[feature];
  if (epilogue.bias.data != nullptr) v += LoadAsFloat(epilogue.bias, feature);
  return Activate(epilogue.activation, v);
}

inline __device__ __noinline__ float ActivateOutOfLine(Activation activation, float v) {
  return Activate(activation, v);
}

// The same for many results of one column: scale and bias are read once, and the activation, whose code is long, is out
// of line.
class ColumnEpilogue {
 public:
  __device__ __forceinline__ ColumnEpilogue(const Epilogue& epilogue, int64_t feature)
      : activation_(epilogue.activation) {
    if (epilogue.scales != nullptr) scale_ = epilogue.scales[feature];
    if (epilogue.bias.data != nullptr) bias_ = LoadAsFloat(epilogue.bias, feature);
  }
  __device__ __forceinline__ float operator()(float v) const {
    v = fmaf(v, scale_, bias_);
    return activation_ == Activation::kNone ? v : ActivateOutOfLine(activation_, v);
  }

 private:
  Activation activation_;
  float scale_ = 1.0f, bias_ = 0.0f;
};

__device__ __forceinline__ bool IsIdentity(const Epilogue& epilogue) {
  return epilogue.scales == nullptr && epilogue.bias.data == nullptr && epilogue.activation == Activation::kNone;
}

template <class Acc>
__device__ __forceinline__ void StoreResult(const Result& result, int64_t index, Acc v) {
  WithOutputType(result.dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(result.data)[index] = To<T>(v);
  });
}

// y[index] = act(v * scales + bias). An int32_t accumulator without an epilogue is stored without passing by float.
template <class Acc>
__device__ __forceinline__ void StoreWithEpilogue(const Problem& problem, int64_t index, int64_t feature, Acc v) {
  if (IsIdentity(problem.epilogue)) return StoreResult(problem.result, index, v);
  StoreResult(problem.result, index, ApplyEpilogue(problem.epilogue, feature, static_cast<float>(v)));
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_DEVICE_CUH_
