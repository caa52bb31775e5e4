// Launch of ew_spmv_wave.cuh: how many columns a block owns, and how many windows it stages at a time.
#ifndef JAX_NMSPARSE_CUDA_EW_WAVE_LAUNCH_CUH_
#define JAX_NMSPARSE_CUDA_EW_WAVE_LAUNCH_CUH_

#include "cuda/ew_spmv_wave.cuh"

namespace nmsparse::cuda::ew {

inline constexpr int64_t kWaveRowBudget = 192 << 10;  // bytes of x per multiprocessor
inline constexpr int64_t kWaveMaxColumns = 512;       // of a block

// The columns of a block that finish first: whole waves of one block per multiprocessor, and what a block costs besides
// its columns (about a microsecond, in columns of this depth at 33 bytes per nanosecond).
template <class C>
int64_t ChooseWaveColumns(const Geometry& geometry, const Device& device) {
  constexpr int64_t kStep = 8;
  const double column_bytes = static_cast<double>(geometry.windows) * (C::kQ * sizeof(typename C::Value) + 4);
  int64_t best = 0;
  double best_cost = 0;
  for (int64_t columns = kStep; columns <= kWaveMaxColumns; columns += kStep) {
    const int64_t blocks = CeilDiv(geometry.out_features, columns) * geometry.batch;
    const double cost = static_cast<double>(CeilDiv(blocks, int64_t{C::kBlocks} * device.multiprocessors)) *
                        (static_cast<double>(columns) + 33e3 / column_bytes);
    if (best == 0 || cost < best_cost) best = columns, best_cost = cost;
  }
  return best;
}

template <class C>
cudaError_t LaunchWave(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.out_features % C::kLaneColumns != 0) return cudaErrorNotSupported;
  if (geometry.batch == 0 || geometry.tokens == 0 || geometry.out_features == 0) return cudaSuccess;
  WavePlan plan;
  plan.columns = static_cast<int32_t>(ChooseWaveColumns<C>(geometry, device));
  const int64_t step = C::kThreads / (plan.columns / C::kLaneColumns) * C::kUnroll;  // windows that a block takes
  const int64_t row_bytes = std::min(kWaveRowBudget / C::kBlocks, device.shared_bytes - C::SharedBytes(0));
  const int64_t budget = row_bytes / (C::kRowBytes * kWindow) / step * step;
  if (budget <= 0) return cudaErrorNotSupported;
  plan.chunk_windows = static_cast<int32_t>(std::min(CeilDiv(geometry.windows, step) * step, budget));
  const dim3 grid(static_cast<unsigned>(CeilDiv(geometry.out_features, plan.columns)), 1,
                  static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(WaveKernel<C>, grid, C::kThreads, C::SharedBytes(plan.chunk_windows), 1, stream, problem,
                          plan);
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_WAVE_LAUNCH_CUH_
