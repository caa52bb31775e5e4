// Launcher of block_mma_many.cuh: which problems it takes, which tile runs.
//
// Memory order: problem.x is [batch, in_features, tokens] and problem.result [batch, out_features, tokens]
// (feature-major), although the shapes in problem.geometry are those of the row-major call.
#include "cuda/block_mma_many.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace nmsparse::cuda {
namespace block_mma_many {
namespace {

int64_t Bytes(DType dtype) { return dtype == DType::kF32 ? 4 : dtype == DType::kS8 ? 1 : 2; }

// What the kernel can be asked for; every other problem is another kernel's.
bool Supports(const Problem& problem) {
  const Geometry& g = problem.geometry;
  const DType x = problem.x.dtype, y = problem.result.dtype;
  const auto fits = [](int64_t v) { return v < (int64_t{1} << 31); };
  const bool operand = (x == DType::kF32 && problem.precision != Precision::kHighest) || x == DType::kBF16 ||
                       x == DType::kF16 || x == DType::kS8;
  const bool result =
      y == DType::kF32 || y == DType::kBF16 || y == DType::kF16 || (x == DType::kS8 && y == DType::kS32);
  return operand && problem.values.dtype == x && result && g.window_units <= kMaskBits && g.bn % kWarpSide == 0 &&
         g.tokens * Bytes(x) % 16 == 0 && fits(g.tokens) && fits(g.windows * g.rows_per_window()) &&
         fits(g.windows * g.out_blocks * g.q * g.bk) && fits(g.out_blocks * g.bn) && fits(g.batch) &&
         IsAligned(problem.x.data) && IsAligned(problem.values.data) && IsAligned(problem.result.data);
}

template <class C>
cudaError_t LaunchTiles(const Problem& problem, const Device& device, cudaStream_t stream) {
  const Geometry& g = problem.geometry;
  Arguments a{};
  a.geometry = g;
  a.x = problem.x.data;
  a.values = problem.values.data;
  a.mask = problem.mask;
  a.epilogue = problem.epilogue;
  a.y = problem.result;
  a.bk = static_cast<int32_t>(g.bk);
  a.kept = g.q * g.bk;
  a.all_kept = static_cast<int32_t>(g.windows * a.kept);
  a.steps = static_cast<int32_t>(CeilDiv(a.all_kept, C::kDepth));
  a.column_tiles = static_cast<int32_t>(CeilDiv(g.out_features, C::kColumns));
  a.token_tiles = static_cast<int32_t>(CeilDiv(g.tokens, C::kTokens));
  a.token_group = 8;
  const int64_t tiles = g.batch * a.column_tiles * a.token_tiles;
  const int64_t blocks = int64_t{device.multiprocessors} * (256 / C::kThreads);
  if (tiles > kMaxBlocks - blocks) return cudaErrorNotSupported;
  a.tiles = static_cast<int32_t>(tiles);
  return LaunchInClusters(ManyTokensMma<C>, static_cast<unsigned>(tiles < blocks ? tiles : blocks), C::kThreads,
                          C::kSharedBytes, 1, stream, a);
}

template <class T, int kProducts>
cudaError_t LaunchOperands(const Problem& problem, cudaStream_t stream) {
  using Wide = Config<T, kProducts, 128, 256, 128>;  // 8.0 and 9.0 have the shared memory
  using Narrow = Config<T, kProducts, 64, 256, 64>;  // fits the 99 KB of 8.6
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const bool wide = problem.geometry.bn % Wide::kColumns == 0 && Wide::kSharedBytes <= device.shared_bytes;
  return wide ? LaunchTiles<Wide>(problem, device, stream) : LaunchTiles<Narrow>(problem, device, stream);
}

}  // namespace
}  // namespace block_mma_many

cudaError_t BlockMmaManySpmm(const Problem& problem, cudaStream_t stream) {
  using namespace block_mma_many;  // NOLINT(build/namespaces)
  if (!Supports(problem)) return cudaErrorNotSupported;
  if (IsEmpty(problem.geometry)) return cudaSuccess;
  switch (problem.x.dtype) {
    case DType::kF32:
      return problem.precision == Precision::kTf32x3 ? LaunchOperands<float, 3>(problem, stream)
                                                     : LaunchOperands<float, 1>(problem, stream);
    case DType::kBF16:
      return LaunchOperands<__nv_bfloat16, 1>(problem, stream);
    case DType::kF16:
      return LaunchOperands<__half, 1>(problem, stream);
    default:
      return LaunchOperands<int8_t, 1>(problem, stream);
  }
}

}  // namespace nmsparse::cuda
