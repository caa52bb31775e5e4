// Launcher of block_many_tokens.cuh: which problems it takes, how a reduction is cut into stages, which tile runs.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.result [batch, out_features, tokens]
// (feature-major), although the shapes in problem.geometry are those of the row-major call.
#include <algorithm>
#include <iterator>

#include "cuda/block_many_tokens.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace block {
namespace {

constexpr int kMaxRows = 64;     // of a stage
constexpr int kMaxWindows = 32;  // of a stage: one mask word per lane

int RoundUp(int64_t v, int to) { return static_cast<int>(CeilDiv(v, to) * to); }

// What the kernel can be asked for; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const Geometry& g = problem.geometry;
  const DType dtype = problem.values.dtype;
  const DType result = problem.result.dtype;
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 31); };
  return (dtype == DType::kBF16 || dtype == DType::kF16) && problem.x.dtype == dtype &&
         (result == DType::kBF16 || result == DType::kF16 || result == DType::kF32) && g.window_units <= kMaskBits &&
         g.bn % kChunk == 0 && (g.bk % kMaxRows == 0 || kMaxRows % g.bk == 0) && g.tokens % 8 == 0 &&
         g.in_features > 0 && fits(g.tokens) && fits((g.windows + kMaxWindows) * g.rows_per_window()) &&
         fits(g.out_blocks * g.bn) && fits(g.batch) && IsAligned(problem.x.data) && IsAligned(problem.values.data) &&
         IsAligned(problem.result.data);
}

// Cuts the reduction into stages of at most `max_rows` kept rows. Whole windows where they fit: as many as waste the
// fewest of the 16 rows of a product, the largest such stage.
template <class C>
cudaError_t PlanStages(const Geometry& g, int max_rows, Arguments* a) {
  constexpr bool kBoxes = C::kGather == Gather::kBoxes;
  const int64_t window_rows = int64_t{g.q} * g.bk;
  a->windows_per_stage = 1;
  a->stages_per_window = 1;
  if (window_rows > max_rows) {
    a->rows = max_rows;
    a->filled_rows = max_rows;
    a->stages_per_window = static_cast<int32_t>(CeilDiv(window_rows, max_rows));
  } else {
    const int used = static_cast<int>(window_rows);
    int& best = a->windows_per_stage;
    for (int windows = 2; windows <= kMaxWindows && windows * used <= max_rows; ++windows) {
      if (int64_t{windows} * RoundUp(best * used, kMmaDepth) >= int64_t{best} * RoundUp(windows * used, kMmaDepth)) {
        best = windows;
      }
    }
    a->rows = RoundUp(best * used, kMmaDepth);
    a->filled_rows = best * used;
  }
  a->groups = static_cast<int32_t>(CeilDiv(g.windows, a->windows_per_stage));
  a->run_rows = kBoxes ? std::min(g.bk, a->rows) : 1;
  a->stages_per_unit = kBoxes ? g.bk / a->run_rows : 1;
  a->entries_per_unit = kBoxes ? 1 : g.bk;
  a->entries_per_stage = kBoxes ? a->filled_rows / a->run_rows : a->rows;
  a->entries_per_group = a->entries_per_stage * a->stages_per_window / a->stages_per_unit;
  a->groups_per_chunk = std::min(kMaxWindows / a->windows_per_stage, C::kListEntries / a->entries_per_group);
  a->windows_per_chunk = a->groups_per_chunk * a->windows_per_stage;
  a->stages_per_chunk = a->groups_per_chunk * a->stages_per_window;
  return a->groups_per_chunk > 0 ? cudaSuccess : cudaErrorNotSupported;
}

template <class C>
cudaError_t EncodeMaps(const Problem& problem, Arguments* a) {
  const Geometry& g = problem.geometry;
  constexpr uint64_t kBytes = 2;
  const uint64_t line = g.bn * kBytes, list = uint64_t(g.q) * g.bk * line, window = list * g.out_blocks;
  const uint32_t boxed_rows = a->stages_per_window > 1 ? a->rows : g.q * g.bk;
  const TensorMapSpec values{
      MapType(problem.values.dtype),
      problem.values.data,
      5,
      {uint64_t(g.bn), uint64_t(g.q) * g.bk, uint64_t(g.out_blocks), uint64_t(g.windows), uint64_t(g.batch)},
      {line, list, window, window * g.windows},
      {kChunk, boxed_rows, 1, uint32_t(a->windows_per_stage), 1}};
  cudaError_t error = EncodeTensorMap(values, &a->values);
  if (error == cudaSuccess && C::kGather == Gather::kBoxes) {
    error = EncodeTensorMap(TokensMap(problem.x.data, problem.x.dtype, g, g.in_features, a->run_rows), &a->x);
  }
  if (error == cudaSuccess && problem.result.dtype != DType::kF32) {
    error = EncodeTensorMap(TokensMap(problem.result.data, problem.result.dtype, g, g.out_features, kMmaRows),
                            &a->output.y);
  }
  return error;
}

// How a Config is run. Both numbers are measured, not derived (docs/kernels/block_many_tokens.md).
struct Tuning {
  int max_rows = kMaxRows;  // of a stage: fewer where two large slots would be all that fits
  int token_group = 8;      // token tiles that walk the columns together
};

template <class C>
int64_t OutputBytes(int splits) {
  if constexpr (C::kSplits) {
    return C::Output::Bytes(splits);
  } else {
    return C::kConsumers * C::Output::kBytes;
  }
}

// Clusters that run at one time.
template <class C>
int Clusters(const Device& device, int splits) {
  return BlocksAtOnce<C>(ManyTokens<C>, device, C::kThreads, kHopperSharedBytes, splits) / splits;
}

// Blocks of a cluster: at most one per group of stages.
template <class C>
cudaError_t LaunchTiles(const Problem& problem, const Tuning& tuning, const Device& device, int splits,
                        cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.x_data = problem.x.data;
  a.mask = problem.mask;
  a.output.geometry = g;
  a.output.epilogue = problem.epilogue;
  a.output.result = problem.result;
  cudaError_t error = PlanStages<C>(g, tuning.max_rows, &a);
  if (error != cudaSuccess) return error;
  a.splits = std::min(splits, a.groups);
  a.output_bytes = static_cast<int32_t>(OutputBytes<C>(a.splits));
  const int fixed = C::FixedBytes() + a.output_bytes;
  a.slots = std::min<int>(C::kMaxSlots, (kHopperSharedBytes - fixed) / C::StageBytes(a.rows));
  if (!OrderTiles(g, C::kOut, C::kTokens, tuning.token_group, &a.order)) return cudaErrorNotSupported;
  error = EncodeMaps<C>(problem, &a);
  if (error != cudaSuccess) return error;
  const int bytes = a.slots * C::StageBytes(a.rows) + fixed;
  const int clusters = std::min(a.order.tiles, Clusters<C>(device, a.splits));
  return LaunchInClusters(ManyTokens<C>, clusters * a.splits, C::kThreads, bytes, a.splits, stream, a);
}

// What a tile costs while all multiprocessors work, in us on an H200.
struct Costs {
  double rows;      // of 64 kept rows
  double window;    // of a window's mask
  double fixed;     // of a call
  double exchange;  // of partial sums in a cluster
};

struct Candidate {
  cudaError_t (*launch)(const Problem&, const Tuning&, const Device&, int splits, cudaStream_t);
  int (*clusters)(const Device&, int splits);
  Tuning tuning;
  int out, tokens;  // of a tile
  bool splits;      // whether a cluster may share a tile
  Costs us;

  double Cost(const Geometry& g, const Device& device, int blocks) const {
    const int64_t tiles = g.batch * CeilDiv(g.out_features, out) * CeilDiv(g.tokens, tokens);
    const double rounds = static_cast<double>(CeilDiv(tiles, clusters(device, blocks)));
    const double windows = static_cast<double>(g.windows), stages = windows * g.q * g.bk / 64;
    return us.fixed + rounds * ((stages * us.rows + windows * us.window) / blocks + (blocks > 1 ? us.exchange : 0.0));
  }
};

template <class C>
constexpr Candidate Measured(Costs us, int max_rows = kMaxRows) {
  return {LaunchTiles<C>, Clusters<C>, {max_rows}, C::kOut, C::kTokens, C::kSplits, us};
}

struct Choice {
  const Candidate* candidate;
  int splits;
};

// The candidate that costs least.
template <size_t kCount>
Choice Cheapest(const Candidate (&candidates)[kCount], const Geometry& g, const Device& device) {
  Choice best{};
  double least = 0;
  for (const Candidate& c : candidates) {
    for (int splits = 1; splits <= (c.splits ? kMaxSplits : 1); ++splits) {
      const double cost = c.Cost(g, device, splits);
      if (best.candidate == nullptr || cost < least) best = {&c, splits}, least = cost;
    }
  }
  return best;
}

// Tiles that split: fitted to a sweep of splits, tokens, densities and shapes (version 6; within 0.3 % of the fastest
// in the mean). 128 x 256, lanes: version 5, the others: version 4, both by the rows of a tile alone.
template <class T>
cudaError_t LaunchFor(const Problem& problem, const Device& device, cudaStream_t stream) {
  static constexpr Candidate kVectors128[] = {Measured<Config<T, 128, 256, Gather::kLanes>>({1.00, 0.013, 7.0, 0}),
                                              Measured<Config<T, 128, 128, Gather::kLanes>>({0.56, 0.0165, 6.6, 5.8}),
                                              Measured<Config<T, 128, 64, Gather::kLanes>>({0.48, 0.0114, 5.3, 3.9})};
  static constexpr Candidate kVectors64[] = {Measured<Config<T, 64, 512, Gather::kLanes>>({1.80, 0.013, 7.0, 0}, 32),
                                             Measured<Config<T, 64, 128, Gather::kLanes>>({0.47, 0.0133, 6.7, 3.1}),
                                             Measured<Config<T, 64, 64, Gather::kLanes>>({0.40, 0.0134, 5.8, 2.6})};
  static constexpr Candidate kBlocks128[] = {Measured<Config<T, 128, 256, Gather::kBoxes>>({1.01, 0, 0, 0}),
                                             Measured<Config<T, 64, 256, Gather::kBoxes>>({0.65, 0, 0, 0})};
  static constexpr Candidate kBlocks64[] = {Measured<Config<T, 64, 512, Gather::kBoxes>>({1.11, 0, 0, 0}, 32),
                                            Measured<Config<T, 64, 256, Gather::kBoxes>>({0.65, 0, 0, 0})};
  const Geometry& g = problem.geometry;
  const auto run = [&](const auto& candidates) {
    const Choice best = Cheapest(candidates, g, device);
    return best.candidate->launch(problem, best.candidate->tuning, device, best.splits, stream);
  };
  const bool wide = g.bn % 128 == 0;
  if (g.bk >= kMmaDepth) return wide ? run(kBlocks128) : run(kBlocks64);
  return wide ? run(kVectors128) : run(kVectors64);
}

}  // namespace
}  // namespace block

cudaError_t BlockWgmmaSpmm(const Problem& problem, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  if (!block::Supports(problem)) return cudaErrorNotSupported;
  Device device;
  const cudaError_t error = QueryHopper(&device);
  if (error != cudaSuccess) return error;
  if (IsEmpty(g)) return cudaSuccess;
  return problem.values.dtype == DType::kBF16 ? block::LaunchFor<__nv_bfloat16>(problem, device, stream)
                                              : block::LaunchFor<__half>(problem, device, stream);
}

}  // namespace nmsparse::cuda
