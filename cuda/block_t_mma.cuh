// dx = g Wᵀ for few tokens, W vector-wise: values as they lie are the A operand of mma.sync.
//
//   dx[t, k] = sum over columns c whose column block keeps row k: g[t, c] * W[k, c]
//
// A warp owns `windows_each` windows, whose kept rows in one column block are the up to 16 rows of an mma tile, and
// walks the columns; a block of threads owns kWarps * windows_each windows, so that its tile of g is shared by all of
// them. A step is 64 columns. With g = lane / 4, t = lane % 4 and h, i in {0, 1}:
//   mma row g, g + 8                       <->  kept row g, g + 8 of the tile
//   mma depth 2t, 2t + 1, 2t + 8, 2t + 9   <->  columns 32h + 8t + 4i + 0, 1, 2, 3  (of product 2h + i of the step)
// so that a lane reads 16 bytes of a row of values, or of a token of g, and has its fragments of two products.
//
// At the end of a column block the products are added to the warp's dx windows in shared memory, float [row][token], at
// the rows that the block's mask names: lanes of a warp hold different rows or tokens, warps own different windows, and
// a warp takes the blocks in ascending order. A cluster of `splits` blocks splits the column blocks; the copies are
// added in a fixed order. Grid: (window groups * splits, token tiles, batch), clusters of `splits` along x.
//
// Shared memory, bytes (T = 8 * kTokenTiles):
//   0                    ring  kStages * (kWarps * 2048 + T * 128)   values of each warp [16][64], then g [T][64]
//   kRingBytes           rows  kWarps * 2 * 16 * 2                    where the tile's rows lie in the warp's windows
//   + 512                dx    kWarps * windows_each * 32 * (T + 8) * 4
// 16-byte chunk c of row r lies at chunk c ^ 4 * (r % 2): both halves of a memory request fall into different banks.
// Synchronisation: one barrier per step (the ring of g is shared).
#ifndef JAX_NMSPARSE_CUDA_BLOCK_T_MMA_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_T_MMA_CUH_

#include "cuda/block_tiles.cuh"

namespace nmsparse::cuda::block {

template <class Value_, int kTokenTiles_>
struct TransposedMmaConfig {
  using Value = Value_;
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kStages = 6;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = 16;     // of an mma tile
  static constexpr int kColumns = 64;  // of a step
  static constexpr int kChunk = 16;    // bytes
  static constexpr int kLineBytes = kColumns * 2;
  static constexpr int kWarpBytes = kRows * kLineBytes;
  static constexpr int kStageBytes = kWarps * kWarpBytes + kTokens * kLineBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kRowsBytes = kWarps * 2 * kRows * 2;
  static constexpr int kPitch = kTokens + 8;  // floats of a row of dx: 8 rows of 8 tokens spread over the banks
  static_assert(sizeof(Value) == 2, "fragments are built from 16-bit elements");
  static_assert(kLineBytes == 8 * kChunk, "8 lanes copy a row of a step");
};

// The place of a row of which a corrupt mask says nothing: it is added nowhere.
inline constexpr uint16_t kNowhere = 0xffff;

struct TransposedMmaPlan {
  int32_t splits;
  int32_t windows_each;  // of a warp; their kept rows fill at most one tile
  bool aligned_g;        // rows of g can be read 16 bytes at a time
};

template <class C>
__device__ __forceinline__ uint32_t ChunkOffset(int row, int chunk) {
  return row * C::kLineBytes + (chunk ^ row % 2 * 4) * C::kChunk;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) BlockTransposedMmaKernel(Problem problem, TransposedMmaPlan plan) {
  using Value = typename C::Value;
  extern __shared__ __align__(128) unsigned char shared[];
  const Geometry& geometry = problem.geometry;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int kept = geometry.q, bn = geometry.bn, rows_each = plan.windows_each * kept;
  const int split = blockIdx.x % plan.splits, group = blockIdx.x / plan.splits;
  const int token0 = blockIdx.y * C::kTokens;
  const int tokens = static_cast<int>(min(int64_t{C::kTokens}, geometry.tokens - token0));
  const int64_t batch = blockIdx.z;
  const int window0 = (group * C::kWarps + warp) * plan.windows_each;  // first window of the warp
  const int windows = max(0, min(plan.windows_each, static_cast<int>(geometry.windows) - window0));
  const int block_begin = static_cast<int>(geometry.out_blocks * split / plan.splits);
  const int block_end = static_cast<int>(geometry.out_blocks * (split + 1) / plan.splits);
  const int steps_per_block = bn / C::kColumns, steps = (block_end - block_begin) * steps_per_block;

  uint16_t* const place = reinterpret_cast<uint16_t*>(shared + C::kRingBytes) + warp * 2 * C::kRows;
  float* const sums_all = reinterpret_cast<float*>(shared + C::kRingBytes + C::kRowsBytes);
  const int rows_of_warp = plan.windows_each * kMaskBits;
  float* const sums = sums_all + warp * rows_of_warp * C::kPitch;
  for (int e = lane; e < rows_of_warp * C::kPitch; e += kWarpSize) sums[e] = 0.0f;

  // Lane 8 * r + c copies chunk c of rows r, r + 4, r + 8, r + 12 of the tile.
  const Value* row_source[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 8 + 4 * i, w = row / kept;
    row_source[i] = nullptr;
    if (row < rows_each && w < windows) {
      row_source[i] = static_cast<const Value*>(problem.values.data) + batch * ValuesPerBatch(geometry) +
                      ((window0 + w) * geometry.out_blocks * kept + (row - w * kept)) * bn + lane % 8 * 8;
    }
  }
  const Value* const g_source =
      static_cast<const Value*>(problem.g.data) + (batch * geometry.tokens + token0) * geometry.out_features;
  int issued = 0, issue_block = block_begin, issue_column = 0, issue_slot = 0;
  auto issue = [&] {
    if (issued < steps) {
      unsigned char* const stage = shared + issue_slot * C::kStageBytes;
      const int64_t offset = int64_t{issue_block} * kept * bn + issue_column;
      const uint32_t own = SharedAddress(stage + warp * C::kWarpBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool valid = row_source[i] != nullptr;
        CopyAsync<16>(own + ChunkOffset<C>(lane / 8 + 4 * i, lane % 8),
                      valid ? row_source[i] + offset : static_cast<const Value*>(problem.values.data), valid);
      }
      const int64_t column = int64_t{issue_block} * bn + issue_column;
      unsigned char* const g_tile = stage + C::kWarps * C::kWarpBytes;
      for (int e = threadIdx.x; e < C::kTokens * 8; e += C::kThreads) {
        const int token = e / 8;
        const int64_t c = column + e % 8 * 8;
        const Value* source = g_source + token * geometry.out_features + c;
        unsigned char* const to = g_tile + ChunkOffset<C>(token, e % 8);
        const int64_t left = token < tokens ? geometry.out_features - c : 0;
        if (left >= 8 ? plan.aligned_g : left <= 0) {
          CopyAsync<16>(SharedAddress(to), left > 0 ? source : g_source, left > 0);
        } else {
          uint16_t part[8];
          for (int i = 0; i < 8; ++i) part[i] = i < left ? reinterpret_cast<const uint16_t*>(source)[i] : 0;
          for (int i = 0; i < 8; ++i) reinterpret_cast<uint16_t*>(to)[i] = part[i];
        }
      }
      ++issued;
      issue_column += C::kColumns;
      if (issue_column == bn) issue_column = 0, ++issue_block;
      if (++issue_slot == C::kStages) issue_slot = 0;
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int s = 0; s < C::kStages - 1; ++s) issue();

  // Lane w of the warp reads the mask of its window w, one block ahead.
  const uint32_t* const mask = problem.mask + batch * MaskPerBatch(geometry) + (window0 + lane) * geometry.out_blocks;
  const bool reads_mask = lane < windows;
  uint32_t next_word = reads_mask && steps > 0 ? __ldg(mask + block_begin) : 0;

  float d[C::kTokenTiles][4] = {};
  int slot = 0, column = 0, block = block_begin;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<C::kStages - 2>();
    __syncthreads();
    issue();
    const unsigned char* const stage = shared + slot * C::kStageBytes;
    const unsigned char* const own = stage + warp * C::kWarpBytes;
    const unsigned char* const g_tile = stage + C::kWarps * C::kWarpBytes;
    if (++slot == C::kStages) slot = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t low[4], high[4];
      LoadWords(low, own + ChunkOffset<C>(lane / 4, 4 * h + lane % 4));
      LoadWords(high, own + ChunkOffset<C>(lane / 4 + 8, 4 * h + lane % 4));
#pragma unroll
      for (int n = 0; n < C::kTokenTiles; ++n) {
        uint32_t b[4];
        LoadWords(b, g_tile + ChunkOffset<C>(8 * n + lane / 4, 4 * h + lane % 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a[4] = {low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
          Mma<Value>(d[n], a, b[2 * i], b[2 * i + 1]);
        }
      }
    }
    column += C::kColumns;
    if (column < bn) continue;
    column = 0, ++block;

    // The block is done: where do the tile's rows lie?
    const uint32_t word = next_word;
    if (reads_mask && block < block_end) next_word = __ldg(mask + block);
    for (int w = 0; w < windows; ++w) {
      const uint32_t bits = __shfl_sync(0xffffffffu, word, w);
      const int rank = __popc(bits & ((1u << lane) - 1)), have = __popc(bits);
      if ((bits >> lane & 1) != 0 && rank < kept) place[w * kept + rank] = static_cast<uint16_t>(w * kMaskBits + lane);
      if (lane >= have && lane < kept) place[w * kept + lane] = kNowhere;  // corrupt mask
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row < windows * kept && place[row] != kNowhere) {
        float* const to = sums + place[row] * C::kPitch + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          float2 v = *reinterpret_cast<float2*>(to + 8 * n);
          v.x += d[n][2 * half], v.y += d[n][2 * half + 1];
          *reinterpret_cast<float2*>(to + 8 * n) = v;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < C::kTokenTiles; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
    __syncwarp();
  }
  WaitForCopies<0>();
  SyncCluster(plan.splits);

  const int rows = C::kWarps * rows_of_warp;  // a multiple of 32
  const int64_t k0 = int64_t{group} * rows;
  WithOutputType(problem.result.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* const out = static_cast<T*>(problem.result.data) + (batch * geometry.tokens + token0) * geometry.in_features;
    for (int row = (split * C::kWarps + warp) * kWarpSize + lane; row < rows; row += plan.splits * C::kThreads) {
      if (k0 + row >= geometry.in_features) continue;
      for (int t = 0; t < tokens; t += 4) {
        float4 total = make_float4(0, 0, 0, 0);
        for (int s = 0; s < plan.splits; ++s) {
          const float4 v = LoadFromBlock(SharedAddress(sums_all + row * C::kPitch + t), s);
          total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        const float part[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (t + i < tokens) out[(t + i) * geometry.in_features + k0 + row] = To<T>(part[i]);
        }
      }
    }
  });
  SyncCluster(plan.splits);
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_T_MMA_CUH_
