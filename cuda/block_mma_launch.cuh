// Host side of block_mma.cuh: the choice of tiles.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MMA_LAUNCH_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MMA_LAUNCH_CUH_

#include <algorithm>
#include <numeric>

#include "cuda/block_mma.cuh"
#include "cuda/launch.h"

namespace nmsparse::cuda::block {

// The cost model: bytes per microsecond of device memory, of L2 to all shared memories, into one multiprocessor, and of
// the exchange of partial sums; two cluster barriers and the staging of a byte of x where nothing hides it,
// microseconds. Fitted on an H200 to the nine fastest plans of each of 105 problems, all with one block per
// multiprocessor; among those plans its choice is within 2 % of the fastest. For two blocks the rate of a block is
// halved, not measured.
inline constexpr double kMemoryRate = 4.3e6, kL2Rate = 5.2e6, kExchangeRate = 2.0e6;
inline constexpr double kClusterTime = 0.3, kStagingTime = 8e-5;
template <class C>
inline constexpr double kBlockRate = C::kBlocks == 1 ? 8.0e4 : 5.5e4 / C::kBlocks;

// Column blocks that `columns` neighbouring columns, starting at a multiple of `columns`, can touch.
inline int64_t BlocksTouched(int64_t columns, int64_t bn) {
  if (columns % bn == 0) return columns / bn;
  if (bn % columns == 0) return 1;
  return (columns + bn - 2) / bn + 1;
}

template <class C>
int64_t SharedBytes(const MmaPlan& plan) {
  return C::kRingBytes + 2 * C::Tile::kBytes + int64_t{4} * plan.blocks * plan.table_rows;
}

template <class C>
int64_t SharedLimit(const Device& device) {
  return device.SharedBytesFor(C::kBlocks, C::kRingBytes + 2 * C::Tile::kBytes + 4096);
}

// The windows of a chunk: as many as the x tile and the table hold, in whole steps.
template <class C>
bool ChooseChunk(const Geometry& geometry, const Device& device, MmaPlan* plan) {
  const int64_t kept = int64_t{geometry.q} * geometry.bk;
  plan->blocks = static_cast<int32_t>(BlocksTouched(plan->column_warps * C::kWarpColumns, geometry.bn));
  const int64_t unit = C::kDepth / std::gcd(kept, int64_t{C::kDepth});  // windows
  int64_t windows = C::Tile::kRows / geometry.rows_per_window() / unit * unit;
  windows = std::min(windows, CeilDiv(CeilDiv(geometry.windows, plan->splits), unit) * unit);
  for (; windows >= unit; windows -= unit) {
    plan->chunk_windows = static_cast<int32_t>(windows);
    plan->table_rows = static_cast<int32_t>(windows * kept);
    if (SharedBytes<C>(*plan) <= SharedLimit<C>(device)) return true;
  }
  return false;
}

// Microseconds, by the larger of what device memory, L2 and one multiprocessor need, for whole waves of blocks.
template <class C>
double Cost(const Geometry& geometry, const Device& device, const MmaPlan& plan) {
  const int64_t columns = plan.column_warps * C::kWarpColumns;
  const int64_t token_tiles = CeilDiv(geometry.tokens, C::kTokens);
  const int64_t blocks = CeilDiv(geometry.out_features, columns) * plan.splits * token_tiles * geometry.batch;
  const int at_once = BlocksAtOnce<C>(BlockMmaKernel<C>, device, C::kThreads, SharedLimit<C>(device), plan.splits);
  const double waves = static_cast<double>(CeilDiv(blocks, at_once));
  const double active = static_cast<double>(blocks) / waves;
  const double windows = static_cast<double>(CeilDiv(geometry.windows, plan.splits));
  const double weights = windows * geometry.q * geometry.bk * columns * static_cast<double>(sizeof(typename C::Weight));
  const double x = windows * static_cast<double>(geometry.rows_per_window()) * C::kTokens * 2;
  const double exchange =
      plan.splits > 1 ? static_cast<double>(C::kTokens) * columns * 4 * active / kExchangeRate + kClusterTime : 0;
  return waves * (std::max({weights * active / static_cast<double>(token_tiles) / kMemoryRate,
                            (weights + x) * active / kL2Rate, (weights + x) / kBlockRate<C>}) +
                  (C::kBlocks == 1 ? x * kStagingTime : 0) + exchange);
}

template <class C>
cudaError_t LaunchMma(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(problem.values.data) % C::kVectorBytes;
  if (addresses != 0) return cudaErrorNotSupported;
  MmaPlan best{};
  double best_cost = 0;
  const int64_t max_splits = device.major >= 9 ? std::min<int64_t>(kMaxSplits, geometry.windows) : 1;
  for (int32_t column_warps = 1; column_warps <= C::kWarps; column_warps *= 2) {
    for (int32_t splits = 1; splits <= max_splits; ++splits) {
      MmaPlan plan{};
      plan.column_warps = column_warps, plan.splits = splits;
      if (!ChooseChunk<C>(geometry, device, &plan)) continue;
      const double cost = Cost<C>(geometry, device, plan);
      if (best.splits == 0 || cost < best_cost) best = plan, best_cost = cost;
    }
  }
  if (best.splits == 0) return cudaErrorNotSupported;
  best.aligned_x = geometry.in_features % 8 == 0 && geometry.rows_per_window() % 8 == 0 && IsAligned(problem.x.data);

  const int64_t tiles = CeilDiv(geometry.out_features, best.column_warps * C::kWarpColumns);
  const dim3 grid(static_cast<unsigned>(tiles * best.splits),
                  static_cast<unsigned>(CeilDiv(geometry.tokens, C::kTokens)), static_cast<unsigned>(geometry.batch));
  return LaunchInClusters(BlockMmaKernel<C>, grid, C::kThreads, SharedBytes<C>(best), best.splits, stream, problem,
                          best);
}

// The fewest token tiles whose x tile still holds whole steps of windows. As many bytes are on their way whatever a
// weight's size.
template <class Value, class Weight, int kVector>
cudaError_t LaunchMmaForTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  constexpr bool kWide = kVector == 16;
  constexpr int kSteps = sizeof(Weight) == 1 && !kWide ? 2 : 1;
  const int64_t tokens = problem.geometry.tokens;
  cudaError_t error = cudaErrorNotSupported;
  if constexpr (!kWide) {
    if (tokens > 32) error = LaunchMma<MmaConfig<Value, Weight, kVector, 8, kSteps * 8, 1>>(problem, device, stream);
  }
  if (tokens > 16 && error == cudaErrorNotSupported) {
    error = LaunchMma<MmaConfig<Value, Weight, kVector, 4, kSteps * 8, 1>>(problem, device, stream);
  }
  if constexpr (!kWide) {
    if (tokens > 8 && error == cudaErrorNotSupported) {
      error = LaunchMma<MmaConfig<Value, Weight, kVector, 2, kSteps * 4, 2>>(problem, device, stream);
    }
  }
  if (error == cudaErrorNotSupported)
    error = LaunchMma<MmaConfig<Value, Weight, kVector, 1, kSteps * 4, 2>>(problem, device, stream);
  if (error == cudaErrorNotSupported)
    error = LaunchMma<MmaConfig<Value, Weight, kVector, 1, kSteps * 8, 1>>(problem, device, stream);
  return error;
}

// Columns of a lane: as many as bn allows, and of 8-bit weights 16 where the sums leave registers for that: up to 8
// tokens, 1.83 times dense instead of 1.52 at 50 %; 17 to 32 tokens, 1.26 instead of 1.15; but 16 tokens 1.31 instead
// of 1.40, and more do not fit.
template <class Value, class Weight>
cudaError_t LaunchMmaForBlock(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int64_t bn = problem.geometry.bn;
  if constexpr (sizeof(Weight) == 1) {
    const int64_t tokens = problem.geometry.tokens;
    if (bn % 128 == 0 && tokens <= 32 && (tokens <= 8 || tokens > 16)) {
      return LaunchMmaForTokens<Value, Weight, 16>(problem, device, stream);
    }
  }
  if (bn % 64 == 0) return LaunchMmaForTokens<Value, Weight, 8>(problem, device, stream);
  if (bn % 32 == 0) return LaunchMmaForTokens<Value, Weight, 4>(problem, device, stream);
  if constexpr (sizeof(Weight) == 2) {  // a lane copies 4 bytes at least
    if (bn % 16 == 0) return LaunchMmaForTokens<Value, Weight, 2>(problem, device, stream);
  }
  return cudaErrorNotSupported;
}

// 8-bit weights (block_few_tokens_narrow.cu).
cudaError_t LaunchMmaNarrow(const Problem& problem, const Device& device, cudaStream_t stream);

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MMA_LAUNCH_CUH_
