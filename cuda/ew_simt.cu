// Launcher of "ew_simt": element-wise weights, windows of 32, two to sixteen tokens, CUDA cores (ew_spmv_wave.cuh).
//
//   x                values                        q              tokens to                x in shared memory
//   bf16             bf16                          3, 4, 8, 16    16 where q <= 4, else 8   float for two, else bf16
//   f32, f16         of x's dtype                  3, 4, 8, 16    8                         of x's dtype
//   f32, bf16, f16   s8, f8e4m3fn                  8, 16          8                         of x's dtype
#include "cuda/ew_wave_launch.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

using ew::WaveConfig;

template <class Value, class Row, int kTokens, int kQ>
cudaError_t Launch(const Problem& problem, const Device& device, cudaStream_t stream) {
  constexpr int kColumnBytes = kQ * static_cast<int>(sizeof(Value));
  constexpr int kLaneColumns = kColumnBytes <= 8 && kTokens <= 8 ? 2 : 1;  // short columns: two per thread
  constexpr int kBytes = kColumnBytes * kLaneColumns;
  constexpr int kThreads = kBytes >= 64 ? 512 : 1024;
  constexpr int kUnroll = kBytes >= 16 ? 1 : 2;
  return ew::LaunchWave<WaveConfig<Value, Row, kTokens, kQ, kThreads, kUnroll, kLaneColumns, 1>>(problem, device,
                                                                                                 stream);
}

template <class Value, class X, int kQ>
cudaError_t LaunchTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  if constexpr (std::is_same_v<X, __nv_bfloat16> && sizeof(Value) == 2) {
    if (tokens <= 2) return Launch<Value, float, 2, kQ>(problem, device, stream);
  }
  if constexpr (!std::is_same_v<X, __half> && std::is_same_v<X, Value>) {
    if (tokens <= 4) return Launch<Value, X, 4, kQ>(problem, device, stream);
  }
  if (tokens <= 8) return Launch<Value, X, 8, kQ>(problem, device, stream);
  if constexpr (std::is_same_v<X, __nv_bfloat16> && sizeof(Value) == 2 && kQ <= 4) {
    if (tokens <= 16) return Launch<Value, X, 16, kQ>(problem, device, stream);
  }
  return cudaErrorNotSupported;
}

template <class Value, class X>
cudaError_t LaunchQ(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int32_t q = problem.geometry.q;
  if (q == 8) return LaunchTokens<Value, X, 8>(problem, device, stream);
  if (q == 16) return LaunchTokens<Value, X, 16>(problem, device, stream);
  if constexpr (sizeof(Value) > 1) {
    if (q == 3) return LaunchTokens<Value, X, 3>(problem, device, stream);
    if (q == 4) return LaunchTokens<Value, X, 4>(problem, device, stream);
  }
  return cudaErrorNotSupported;
}

template <class X>
cudaError_t LaunchValues(const Problem& problem, const Device& device, cudaStream_t stream) {
  const DType values = problem.values.dtype;
  if (values == problem.x.dtype) return LaunchQ<X, X>(problem, device, stream);
  if (values == DType::kS8) return LaunchQ<int8_t, X>(problem, device, stream);
  if (values == DType::kF8E4M3FN) return LaunchQ<E4M3, X>(problem, device, stream);
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t EwSimt(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.bk != 1 || geometry.bn != 1 || geometry.window_units != ew::kWindow || geometry.batch > kMaxGridYz ||
      geometry.windows > ew::kMaxWindows || !ew::Aligned(problem)) {
    return cudaErrorNotSupported;
  }
  Device device;
  if (const cudaError_t error = QueryDevice(&device); error != cudaSuccess) return error;
  switch (problem.x.dtype) {
    case DType::kF32:
      return LaunchValues<float>(problem, device, stream);
    case DType::kBF16:
      return LaunchValues<__nv_bfloat16>(problem, device, stream);
    case DType::kF16:
      return LaunchValues<__half>(problem, device, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace nmsparse::cuda
