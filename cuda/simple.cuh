// What the three "simple" kernels share: one register-tiled product that their functors feed and drain.
//
//   out [64, 64] = sum over steps of a [32, 64]ᵀ b [32, 64]
//
//             reduction            a (64 wide)      b (64 wide)        out
//   spmm      rows of W            tokens of x      columns of W       y  [tokens, columns]
//   spmm_t    columns of W         tokens of g      rows of W          dx [tokens, rows]
//   sddmm     tokens               rows of W in x   columns of W in g  (xᵀ g), of which the kept units are written
//
// W is expanded to dense tiles on its way into shared memory, so the cost is that of a dense product on CUDA cores.
// A reduction is summed in an order that the shapes alone fix, so results do not depend on the run.
//
// Absent weights. A NaN or an infinity of x may reach a result through kept units only, but 0 * Inf is NaN. So an
// absent weight is stored as -0.0f, kept zeros as +0.0f (sums start from +0.0f: no result can tell them apart), and a
// step whose `a` holds a value that is not finite takes the slow loop, which leaves absent weights out.
//
// Threads: groups of 128, 16 across and 8 down; thread (down, across) owns rows 8 * down ... + 7 and columns 4 * across
// ... + 3. Where the output has too few tiles to fill the device, a block is four groups that take every fourth step of
// the same tile, and their sums are added in group order.
// Shared memory, 17,408 bytes per group: a [32][68], b [32][68], reused at the end as out [64][68]. Rows are padded by
// 4 words so that 16-byte stores down a column fall into different banks. Synchronisation: a group's next step is
// loaded to registers while the current one is multiplied; two barriers of the block per step, for which all groups run
// the same number of steps (the last ones may be empty).
#ifndef JAX_NMSPARSE_CUDA_SIMPLE_CUH_
#define JAX_NMSPARSE_CUDA_SIMPLE_CUH_

#include "cuda/device.cuh"

namespace nmsparse::cuda::simple {

inline constexpr int kTile = 64;   // rows and columns of an output tile
inline constexpr int kDepth = 32;  // reduction per step, and rows of a row tile
inline constexpr int kThreads = 128;
inline constexpr int kRun = kTile * kDepth / kThreads;  // elements of a and of b that a thread loads per step
inline constexpr int kThreadRows = 8;
inline constexpr int kThreadColumns = 4;
inline constexpr int kStride = kTile + 4;
static_assert(kDepth == kMaskBits, "a step of spmm is one row tile");
static_assert(kTile / kThreadRows * (kTile / kThreadColumns) == kThreads, "the threads cover the output tile");
static_assert(kRun == 16, "the functors assign 16 elements per thread");

// At most this many tokens take the few-token kernels.
inline constexpr int64_t kFewTokens = 32;
// Fewer output tiles than this are computed by four groups each. Four blocks of one group fit a multiprocessor.
inline constexpr int64_t kManyTiles = 512;
inline constexpr int kGroups = 4;

template <class Acc>
__device__ __forceinline__ Acc Absent() {
  if constexpr (std::is_same_v<Acc, float>) return -0.0f;
  return Acc(0);
}

// out[i] = the column's weight in row i, for the rows whose bit is set; `list` is the column's list of kept rows from
// the first of them on, `stride` apart.
template <class Acc>
__device__ __forceinline__ void LoadColumn(const Operand& values, int64_t list, int32_t stride, uint32_t bits,
                                           Acc (&out)[kRun]) {
  WithInputType<Acc>(values.dtype, [&](auto zero) {
    const auto* source = static_cast<const decltype(zero)*>(values.data) + list;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      out[i] = Absent<Acc>();
      if (bits >> i & 1) {
        out[i] = ToAccumulator<Acc>(*source) + Acc(0);  // -0.0f becomes +0.0f
        source += stride;
      }
    }
  });
}

// A run of 16 elements of x or g.
template <class Acc>
__device__ __forceinline__ void LoadActivations(const Operand& operand, int64_t offset, int count, Acc (&out)[kRun]) {
  WithInputType<Acc>(operand.dtype, [&](auto zero) {
    LoadRun<kRun>(static_cast<const decltype(zero)*>(operand.data) + offset, count, out);
  });
}

template <class Acc>
__device__ __forceinline__ bool AllFinite(const Acc (&run)[kRun]) {
  if constexpr (std::is_same_v<Acc, float>) {
    float poison = 0.0f;
#pragma unroll
    for (int i = 0; i < kRun; ++i) poison = fmaf(run[i], 0.0f, poison);
    return poison == 0.0f;
  }
  return true;
}

// This thread's 16 elements of a tile stored [reduction][row or column].
template <class Acc>
__device__ __forceinline__ void StoreDown(Acc (&tile)[kDepth][kStride], int depth, int column, const Acc (&run)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) tile[depth + i][column] = run[i];
}

template <class Acc>
__device__ __forceinline__ void StoreAcross(Acc (&tile)[kDepth][kStride], int depth, int column,
                                            const Acc (&run)[kRun]) {
  static_assert(sizeof(Acc) == 4);
#pragma unroll
  for (int i = 0; i < kRun; i += 4) {
    int4 four;
    memcpy(&four, &run[i], sizeof(four));
    *reinterpret_cast<int4*>(&tile[depth][column + i]) = four;
  }
}

template <bool kSkipAbsent, class Acc>
__device__ __forceinline__ void MultiplyStep(const Acc (&a)[kDepth][kStride], const Acc (&b)[kDepth][kStride],
                                             int depth, int row, int column, Acc (&sum)[kThreadRows][kThreadColumns]) {
  constexpr int kUnroll = kSkipAbsent ? 1 : 8;
  for (int base = 0; base < depth; base += kUnroll) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      int4 raw[3] = {*reinterpret_cast<const int4*>(&a[base + i][row]),
                     *reinterpret_cast<const int4*>(&a[base + i][row + 4]),
                     *reinterpret_cast<const int4*>(&b[base + i][column])};
      Acc left[kThreadRows], right[kThreadColumns];
      memcpy(left, raw, sizeof(left));
      memcpy(right, raw + 2, sizeof(right));
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int c = 0; c < kThreadColumns; ++c) {
          if constexpr (kSkipAbsent) {
            if (__float_as_uint(right[c]) == __float_as_uint(Absent<Acc>())) continue;
          }
          sum[r][c] += left[r] * right[c];
        }
      }
    }
  }
}

template <class Acc>
union SharedTiles {
  Acc step[2][kDepth][kStride];
  Acc out[kTile][kStride];
};

// An Op is built from the problem and the number of an output tile, and provides
//   using Accumulator;                static int64_t Tiles(problem)
//   int32_t Steps()                   int Depth(step): reduction of the step that is not padding
//   LoadA(step, run) -> bool          whether all is finite (sddmm: always true, its b has no absent elements)
//   LoadB(step, run)                  StoreA(tile, run), StoreB(tile, run)
//   Emit(out)                         called by the threads of one group after a barrier
// It sees its place in the group as threadIdx.x; threadIdx.y is the group.
template <class Op, int kBlockGroups>
__global__ void __launch_bounds__(kThreads* kBlockGroups, kGroups / kBlockGroups)
    TiledProduct(const __grid_constant__ Problem problem) {
  using Acc = typename Op::Accumulator;
  extern __shared__ __align__(16) unsigned char raw_shared[];
  auto* groups = reinterpret_cast<SharedTiles<Acc>*>(raw_shared);
  const int group = kBlockGroups == 1 ? 0 : threadIdx.y;
  SharedTiles<Acc>& shared = groups[group];
  auto& a = shared.step[0];
  auto& b = shared.step[1];
  const int row = threadIdx.x / (kTile / kThreadColumns) * kThreadRows;
  const int column = threadIdx.x % (kTile / kThreadColumns) * kThreadColumns;

  const int64_t tiles = Op::Tiles(problem);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Op op(problem, tile);
    Acc sum[kThreadRows][kThreadColumns] = {};
    Acc run_a[kRun], run_b[kRun];
    const int32_t steps = op.Steps();
    bool finite = true;
    if (group < steps) {
      finite = op.LoadA(group, run_a);
      op.LoadB(group, run_b);
    }
    for (int32_t base = 0; base < steps; base += kBlockGroups) {
      const int32_t step = base + group;
      if (step < steps) {
        op.StoreA(a, run_a);
        op.StoreB(b, run_b);
      }
      const bool all_finite = __syncthreads_and(finite);
      if (step + kBlockGroups < steps) {
        finite = op.LoadA(step + kBlockGroups, run_a);
        op.LoadB(step + kBlockGroups, run_b);
      }
      const int depth = step < steps ? op.Depth(step) : 0;
      if constexpr (std::is_same_v<Acc, float>) {
        if (!all_finite) {
          MultiplyStep<true>(a, b, depth, row, column, sum);
        } else {
          MultiplyStep<false>(a, b, depth, row, column, sum);
        }
      } else {
        MultiplyStep<false>(a, b, depth, row, column, sum);
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      int4 four;
      memcpy(&four, sum[r], sizeof(four));
      *reinterpret_cast<int4*>(&shared.out[row + r][column]) = four;
    }
    __syncthreads();
    if constexpr (kBlockGroups > 1) {
      for (int i = group * kThreads + threadIdx.x; i < kTile * kTile; i += kThreads * kBlockGroups) {
        Acc total = groups[0].out[i / kTile][i % kTile];
        for (int g = 1; g < kBlockGroups; ++g) total += groups[g].out[i / kTile][i % kTile];
        groups[0].out[i / kTile][i % kTile] = total;
      }
      __syncthreads();
    }
    if (group == 0) op.Emit(shared.out);
    __syncthreads();
  }
}

// Sizes that the kernels hold in 32 bits: one axis at a time, never a product of two.
inline bool FitsIn32Bits(const Geometry& geometry) {
  constexpr int64_t kLimit = 0x7fffffff - kTile;
  return geometry.in_features <= kLimit && geometry.out_blocks * geometry.bn <= kLimit &&
         geometry.rows_per_window() <= kLimit;
}

inline cudaError_t LaunchTiles(void (*kernel)(Problem), const Problem& problem, int64_t tiles, dim3 block,
                               int shared_bytes, cudaStream_t stream) {
  if (tiles == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(GridSize(tiles));
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, problem);
}

template <class Op>
cudaError_t LaunchTiledProduct(const Problem& problem, cudaStream_t stream) {
  constexpr int kGroupBytes = sizeof(SharedTiles<typename Op::Accumulator>);
  const int64_t tiles = Op::Tiles(problem);
  if (tiles >= kManyTiles) {
    return LaunchTiles(TiledProduct<Op, 1>, problem, tiles, dim3(kThreads), kGroupBytes, stream);
  }
  const cudaError_t status = cudaFuncSetAttribute(TiledProduct<Op, kGroups>,
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kGroups * kGroupBytes);
  if (status != cudaSuccess) return status;
  return LaunchTiles(TiledProduct<Op, kGroups>, problem, tiles, dim3(kThreads, kGroups), kGroups * kGroupBytes, stream);
}

}  // namespace nmsparse::cuda::simple

#endif  // JAX_NMSPARSE_CUDA_SIMPLE_CUH_
