// Launcher of "block_spmv": vector-wise and block-wise weights in windows of 32 units, one to four tokens, CUDA cores
// (block_spmv.cuh). x: f32, bf16, f16; values: x's dtype, s8 or f8e4m3fn, 16 bytes of a row in one block.
#include <algorithm>

#include "cuda/block_spmv.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace {

using block::SpmvConfig;
using block::SpmvPlan;

inline constexpr int64_t kMaxTokens = 4;
inline constexpr int64_t kMaxRows = 1024;       // of a window
inline constexpr int64_t kRowBytes = 64 << 10;  // of x per block
inline constexpr int64_t kSectorBytes = 32;

// The columns of a block that finish first: whole waves of one block per multiprocessor, and what a block costs besides
// its columns (about a microsecond, in columns of this depth at 33 bytes per nanosecond).
template <class C>
int64_t ChooseColumns(const Geometry& geometry, const Device& device) {
  constexpr int64_t kStep = kSectorBytes / sizeof(typename C::Value);
  const double column_bytes =
      static_cast<double>(geometry.windows * geometry.q * geometry.bk * sizeof(typename C::Value));
  int64_t best = 0;
  double best_cost = 0;
  for (int64_t columns = kStep; columns <= C::kThreads * C::kLaneColumns; columns += kStep) {
    const int64_t blocks = CeilDiv(geometry.out_features, columns) * geometry.batch;
    const double waves = static_cast<double>(CeilDiv(blocks, device.multiprocessors));
    const double cost = waves * (static_cast<double>(columns) + 33e3 / column_bytes);
    if (best == 0 || cost < best_cost) best = columns, best_cost = cost;
  }
  return best;
}

template <class C>
cudaError_t Launch(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  SpmvPlan plan;
  plan.columns = static_cast<int32_t>(ChooseColumns<C>(geometry, device));
  plan.items = static_cast<int32_t>(CeilDiv(geometry.q, C::kRows));
  const int64_t window_rows = geometry.rows_per_window();
  plan.chunk_windows = static_cast<int32_t>(
      std::min(geometry.windows, std::max(int64_t{1}, kRowBytes / (4 * C::kTokens * window_rows))));
  const int64_t shared = C::SharedBytes(plan.chunk_windows * window_rows);
  if (shared > device.shared_bytes) return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>(CeilDiv(geometry.out_features, plan.columns)), 1,
                  static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(block::BlockSpmvKernel<C>, grid, C::kThreads, shared, 1, stream, problem, plan);
}

template <class Value>
cudaError_t LaunchTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.bn % (16 / sizeof(Value)) != 0) return cudaErrorNotSupported;
  if (IsEmpty(geometry)) return cudaSuccess;
  constexpr int kThreads =
      sizeof(Value) == 1 ? 256 : 512;  // partial sums of 16 columns and 4 tokens take the shared memory
  if (geometry.tokens > 2) return Launch<SpmvConfig<Value, 4, 4, kThreads>>(problem, device, stream);
  if (geometry.tokens == 2) return Launch<SpmvConfig<Value, 2, 4>>(problem, device, stream);
  if (geometry.q % 8 == 0) return Launch<SpmvConfig<Value, 1, 8>>(problem, device, stream);
  return Launch<SpmvConfig<Value, 1, 4>>(problem, device, stream);
}

}  // namespace

cudaError_t BlockSpmv(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.window_units != kMaskBits || geometry.tokens > kMaxTokens || geometry.batch > kMaxGridYz ||
      geometry.rows_per_window() > kMaxRows || !IsAligned(problem.values.data)) {
    return cudaErrorNotSupported;
  }
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const DType x = problem.x.dtype, values = problem.values.dtype;
  if (x != DType::kF32 && x != DType::kBF16 && x != DType::kF16) return cudaErrorNotSupported;
  if (values == DType::kS8) return LaunchTokens<int8_t>(problem, device, stream);
  if (values == DType::kF8E4M3FN) return LaunchTokens<E4M3>(problem, device, stream);
  if (values != x) return cudaErrorNotSupported;
  if (x == DType::kF32) return LaunchTokens<float>(problem, device, stream);
  if (x == DType::kBF16) return LaunchTokens<__nv_bfloat16>(problem, device, stream);
  return LaunchTokens<__half>(problem, device, stream);
}

}  // namespace nmsparse::cuda
