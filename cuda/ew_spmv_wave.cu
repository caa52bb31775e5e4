// Launcher of "ew_spmv_wave": element-wise weights, windows of 32, one token, CUDA cores (ew_spmv_wave.cuh).
//
//   x                values           sums     q
//   f32, bf16, f16   of x's dtype     float    3, 4, 8, 16
//   f32, bf16, f16   s8, f8e4m3fn     float    8, 16
#include "cuda/ew_wave_launch.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

using ew::WaveConfig;

// Threads, windows at once and blocks of a multiprocessor, by the bytes of a thread's columns: measured, not derived.
template <class Value, int kQ>
cudaError_t LaunchConfig(const Problem& problem, const Device& device, cudaStream_t stream) {
  constexpr int kColumnBytes = kQ * static_cast<int>(sizeof(Value));
  constexpr int kLaneColumns = kColumnBytes <= 12 ? 2 : 1;  // short columns: two per thread, for wider loads
  constexpr int kBytes = kColumnBytes * kLaneColumns;
  constexpr bool kWords = sizeof(Value) > 1 && kBytes == 16;
  constexpr int kThreads = kWords || kBytes == 24 || kBytes >= 64 ? 512 : 1024;
  constexpr int kUnroll = kBytes >= 32 ? 1 : kBytes == 24 ? 3 : 2;
  return ew::LaunchWave<WaveConfig<Value, float, 1, kQ, kThreads, kUnroll, kLaneColumns, kWords ? 2 : 1>>(
      problem, device, stream);
}

template <class Value>
cudaError_t LaunchQ(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int32_t q = problem.geometry.q;
  if (q == 8) return LaunchConfig<Value, 8>(problem, device, stream);
  if (q == 16) return LaunchConfig<Value, 16>(problem, device, stream);
  if constexpr (sizeof(Value) > 1) {
    if (q == 3) return LaunchConfig<Value, 3>(problem, device, stream);
    if (q == 4) return LaunchConfig<Value, 4>(problem, device, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t EwSpmvWave(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.bk != 1 || geometry.bn != 1 || geometry.window_units != ew::kWindow || geometry.tokens > 1 ||
      geometry.batch > 65535 || geometry.windows > ew::kMaxWindows || !ew::Aligned(problem)) {
    return cudaErrorNotSupported;
  }
  Device device;
  if (const cudaError_t error = QueryDevice(&device); error != cudaSuccess) return error;
  const DType x = problem.x.dtype, values = problem.values.dtype;
  if (x != DType::kF32 && x != DType::kBF16 && x != DType::kF16) return cudaErrorNotSupported;
  if (values == DType::kS8) return LaunchQ<int8_t>(problem, device, stream);
  if (values == DType::kF8E4M3FN) return LaunchQ<E4M3>(problem, device, stream);
  if (values != x) return cudaErrorNotSupported;
  if (x == DType::kF32) return LaunchQ<float>(problem, device, stream);
  if (x == DType::kBF16) return LaunchQ<__nv_bfloat16>(problem, device, stream);
  return LaunchQ<__half>(problem, device, stream);
}

}  // namespace nmsparse::cuda
