// Launcher of "block_ring": vector-wise and block-wise weights of bn a multiple of 64, bfloat16 or float16, few tokens,
// on sm_90 (block_ring.cuh). More than 64 tokens are several token tiles, each of which reads the weights.
#include <algorithm>

#include "cuda/block_launch.h"
#include "cuda/block_ring.cuh"
#include "cuda/kernels.h"

namespace nmsparse::cuda {
namespace {

using block::Device;
using block::RingConfig;
using block::RingPlan;

inline constexpr int64_t kMaxTokens = 128;

// The cost model: bytes per microsecond of device memory, of L2 to all shared memories, into one multiprocessor by one
// warp's ring, and of the exchange of partial sums; microseconds of a block's beginning and end, and of two cluster
// barriers.
inline constexpr double kMemoryRate = 4.2e6, kL2Rate = 5.2e6, kWarpRate = 8e3, kExchangeRate = 2.0e6;
inline constexpr double kBlockTime = 2.0, kClusterTime = 0.5;

template <class C>
int64_t SharedBytes(const RingPlan& plan) {
  const int64_t tables = int64_t{4} * plan.blocks * (plan.chunk_windows / plan.step_windows) * plan.steps_per_window;
  return C::kTables + tables * C::kDepth;
}

// Steps, and the windows of a chunk for plan->column_warps.
template <class C>
bool ChooseChunk(const Geometry& geometry, const Device& device, RingPlan* plan) {
  const int64_t kept = int64_t{geometry.q} * geometry.bk, columns = int64_t{plan->column_warps} * C::kWarpColumns;
  plan->step_windows = static_cast<int32_t>(kept <= C::kDepth ? C::kDepth / kept : 1);
  plan->steps_per_window = static_cast<int32_t>(CeilDiv(kept, C::kDepth));
  plan->box_rows = static_cast<int32_t>(CeilDiv(kept, plan->steps_per_window));
  plan->blocks = static_cast<int32_t>(columns % geometry.bn == 0 ? columns / geometry.bn
                                                                 : (columns - C::kWarpColumns - 1) / geometry.bn + 2);
  int64_t windows = std::min<int64_t>(C::kChunkRows / geometry.rows_per_window(), C::kProducers / plan->blocks);
  windows = std::min(windows, CeilDiv(geometry.windows, plan->step_windows) * plan->step_windows);
  for (windows -= windows % plan->step_windows; windows > 0; windows -= plan->step_windows) {
    plan->chunk_windows = static_cast<int32_t>(windows);
    if (SharedBytes<C>(*plan) <= device.shared_bytes) return true;
  }
  return false;
}

template <class C>
double Cost(const Geometry& geometry, const Device& device, const RingPlan& plan) {
  const int64_t columns = int64_t{plan.column_warps} * C::kWarpColumns;
  const int64_t token_tiles = CeilDiv(geometry.tokens, C::kTokens);
  const int64_t blocks = CeilDiv(geometry.out_features, columns) * plan.splits * token_tiles * geometry.batch;
  const int at_once =
      block::BlocksAtOnce<C>(block::BlockRingKernel<C>, device, C::kThreads, C::kTables + 4096, plan.splits);
  const double waves = static_cast<double>(CeilDiv(blocks, at_once));
  const double active = static_cast<double>(blocks) / waves;
  const double windows =
      static_cast<double>(CeilDiv(CeilDiv(geometry.windows, plan.step_windows), plan.splits) * plan.step_windows);
  const double weights = windows * geometry.q * geometry.bk * static_cast<double>(columns) * 2;
  const double x = windows * static_cast<double>(geometry.rows_per_window()) * C::kTokens * 2;
  const int warps = C::kWarps / plan.column_warps * plan.column_warps;
  const double exchange =
      plan.splits > 1 ? C::kTokens * static_cast<double>(columns) * 4 * active / kExchangeRate + kClusterTime : 0;
  return waves *
         (std::max({weights * active / kMemoryRate, (weights + x) * active / kL2Rate, weights / (kWarpRate * warps)}) +
          kBlockTime + exchange);
}

template <class C>
cudaError_t Launch(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  RingPlan best{};
  double best_cost = 0;
  for (int32_t column_warps = 1; column_warps <= C::kWarps; ++column_warps) {
    for (int32_t splits = 1; splits <= block::kMaxSplits; ++splits) {
      RingPlan plan{};
      plan.column_warps = column_warps, plan.splits = splits;
      if (!ChooseChunk<C>(geometry, device, &plan)) continue;
      if (splits > CeilDiv(geometry.windows, plan.step_windows)) break;
      const double cost = Cost<C>(geometry, device, plan);
      if (best.splits == 0 || cost < best_cost) best = plan, best_cost = cost;
    }
  }
  if (best.splits == 0) return cudaErrorNotSupported;
  best.aligned_x = geometry.in_features % 8 == 0 && geometry.rows_per_window() % 8 == 0 &&
                   reinterpret_cast<uintptr_t>(problem.x.data) % 16 == 0;

  const uint64_t row = uint64_t{2} * geometry.bn, block = row * geometry.q * geometry.bk;
  const uint64_t window = block * geometry.out_blocks;
  const TensorMapSpec spec = {
      CU_TENSOR_MAP_DATA_TYPE_UINT16,
      problem.values.data,
      5,
      {static_cast<uint64_t>(geometry.bn), static_cast<uint64_t>(geometry.q) * geometry.bk,
       static_cast<uint64_t>(geometry.windows), static_cast<uint64_t>(geometry.out_blocks),
       static_cast<uint64_t>(geometry.batch)},
      {row, window, block, window * geometry.windows},
      {C::kWarpColumns, static_cast<uint32_t>(best.box_rows), static_cast<uint32_t>(best.step_windows), 1, 1}};
  CUtensorMap map;
  if (const cudaError_t error = EncodeTensorMap(spec, &map); error != cudaSuccess) return error;

  const int64_t tiles = CeilDiv(geometry.out_features, int64_t{best.column_warps} * C::kWarpColumns);
  const dim3 grid(static_cast<unsigned>(tiles * best.splits),
                  static_cast<unsigned>(CeilDiv(geometry.tokens, C::kTokens)), static_cast<unsigned>(geometry.batch));
  return block::LaunchInClusters(block::BlockRingKernel<C>, grid, C::kThreads, SharedBytes<C>(best), best.splits,
                                 stream, problem, best, map);
}

template <class Value>
cudaError_t LaunchForTokens(const Problem& problem, const Device& device, cudaStream_t stream) {
  const int64_t tokens = problem.geometry.tokens;
  if (tokens <= 8) return Launch<RingConfig<Value, 1>>(problem, device, stream);
  if (tokens <= 16) return Launch<RingConfig<Value, 2>>(problem, device, stream);
  if (tokens <= 32) return Launch<RingConfig<Value, 4>>(problem, device, stream);
  return Launch<RingConfig<Value, 8>>(problem, device, stream);
}

}  // namespace

cudaError_t BlockRingSpmm(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (problem.x.dtype != problem.values.dtype || geometry.bn % 64 != 0 || geometry.tokens > kMaxTokens ||
      geometry.batch > block::kMaxGridYz || reinterpret_cast<uintptr_t>(problem.values.data) % 16 != 0) {
    return cudaErrorNotSupported;
  }
  if (block::IsEmpty(geometry)) return cudaSuccess;
  Device device;
  const cudaError_t error = block::QueryDevice(&device);
  if (error != cudaSuccess) return error;
  if (device.major != 9) return cudaErrorNotSupported;
  if (problem.x.dtype == DType::kBF16) return LaunchForTokens<__nv_bfloat16>(problem, device, stream);
  if (problem.x.dtype == DType::kF16) return LaunchForTokens<__half>(problem, device, stream);
  return cudaErrorNotSupported;
}

}  // namespace nmsparse::cuda
