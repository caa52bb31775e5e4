// y = act((x W) * scales + bias) for few tokens, W vector-wise or block-wise: plain compressed tiles on tensor cores.
//
//   y[t, c] = sum over kept rows k of c's column block: x[t, k] * W[k, c]
//
// A column block keeps q * bk rows per window, and its kept values are one dense matrix [kept rows, bn]. The order of a
// sum is free, and so is which column of a tile is which row of the mma; both are chosen so that a lane loads its
// weights as they lie in memory and needs nothing of its neighbours:
//
//   a warp owns kWarpColumns = 8 * kVector columns of one block (g = lane / 4, t = lane % 4); a step is 16 kept rows
//   lane (g, t) reads rows 4t ... 4t + 3 at columns kVector * g ...: four vectors, 16 bytes each at kVector = 8
//   mma row g, g + 8   of tile i   <->  columns kVector * g + 2i, + 2i + 1       (A: weights, one PRMT per register)
//   mma depth 2t, 2t + 1, 2t + 8, 2t + 9  <->  kept rows 4t, 4t + 1, 4t + 2, 4t + 3
//   mma column g       of tile n   <->  token 8n + g                             (B: xᵀ)
//
// 8-bit weights (int8, float8_e4m3fn) pass through the ring as they are and become 16-bit on the way into A
// (narrow_weights.cuh), exactly; their scales belong to the epilogue.
//
// Weights pass through a ring in shared memory that is private to a warp (cp.async by lanes that follow memory, read
// back by the lanes of the fragments): kStages - 1 steps in flight per warp without registers and without a block
// barrier. x is shared by the column_warps warps side by side: chunk_windows windows at a time it is transposed into a
// tile of rows k (XTile), from which ldmatrix.trans gathers any 16 kept rows into B; a table holds where each kept row
// lies. The next chunk is on its way in registers while this one is multiplied: one barrier per chunk.
//
// Depth is split over the warps (kWarps / column_warps groups take the steps in turn) and over a cluster of `splits`
// blocks (windows): partial sums meet in shared memory and are added in a fixed order. Grid: (column tiles * splits,
// token tiles, batch), clusters of `splits` along x.
//
// Shared memory, bytes:
//   0                        ring    kWarps * kStages * 4 * 32 * kVectorBytes    (128 KB at 16 bytes, 8 stages)
//   kRingBytes               x tile  2 * (32,768 + 16 * kTokenTiles)
//   ... + 2 * XTile::kBytes  table   2 * blocks * table_rows * 2
//   after the last step everything is reused: sums [warp groups][tokens][columns + 4] float
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MMA_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MMA_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/narrow_weights.cuh"

namespace nmsparse::cuda::block {

template <class Value_, class Weight_, int kVector_, int kTokenTiles_, int kStages_, int kBlocks_>
struct MmaConfig {
  using Value = Value_;                             // of x and of the products
  using Weight = Weight_;                           // in memory
  static constexpr int kVector = kVector_;          // columns of a lane
  static constexpr int kTokenTiles = kTokenTiles_;  // 8 tokens each
  static constexpr int kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;  // of a multiprocessor: two hide each other's staging of x
  // Read the next x tile while this one is multiplied; not where that takes registers that two blocks do not have.
  static constexpr bool kEarly = kBlocks == 1 || kTokenTiles < 4;
  static constexpr int kWarps = 8;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kDepth = 16;  // kept rows of a step
  static constexpr int kWarpColumns = 8 * kVector;
  static constexpr int kVectorBytes = static_cast<int>(sizeof(Weight)) * kVector;
  static constexpr int kWords = kVectorBytes / 4;
  static constexpr int kRowBytes = 8 * kVectorBytes;
  static constexpr int kStageBytes = kDepth * kRowBytes;  // of one warp
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  using Tile = XTile<kTokenTiles, kThreads, kBlocks == 1 ? 2048 : 1024>;
  static_assert(sizeof(Value) == 2, "fragments are built from 16-bit elements");
  static_assert(kVectorBytes == 4 || kVectorBytes == 8 || kVectorBytes == 16,
                "a lane copies 4, 8 or 16 bytes of a row");
  static_assert(kStages >= 2, "the slot being filled must not be the one being read");
};

// Chosen by the launcher (block_few_tokens.cu).
struct MmaPlan {
  int32_t column_warps;   // warps side by side, a power of two
  int32_t splits;         // blocks of a cluster
  int32_t chunk_windows;  // windows of an x tile; their kept rows are a multiple of a step
  int32_t blocks;         // column blocks that a block of threads touches
  int32_t table_rows;     // kept rows of a chunk
  bool aligned_x;         // rows of x can be read 16 bytes at a time
};

// j / divisor for j * divisor < 2^32.
struct Divider {
  uint32_t divisor, magic;
  __device__ explicit Divider(uint32_t d) : divisor(d), magic(d == 1 ? 0 : 0xffffffffu / d + 1) {}
  __device__ __forceinline__ int operator()(uint32_t j) const { return divisor == 1 ? j : __umulhi(j, magic); }
};

// The kept values of one warp's columns, step by step, on their way into the warp's ring. Kept rows are numbered
// through the windows of this block of threads; lane 8 * r + c copies chunk c (kVector columns) of rows 4r ... 4r + 3
// of every groups-th step, so that the lanes of one memory request, 8 neighbours, ask for one run of memory (with the
// lanes of a fragment copying for themselves L2 saw requests of 32 bytes, four times as many: 2.4 TB/s).
template <class C>
struct WeightStream {
  const typename C::Weight* source;  // row `row` of the current window
  int64_t jump, wrap;                // elements from one step to the next, and where that leaves the window
  int row, row_jump, kept, bn;
  int left;  // rows from this one to the end
  int stride;
  uint32_t slot, ring_begin, ring_end;

  __device__ __forceinline__ WeightStream(const typename C::Weight* base, int64_t window_pitch, int kept, int bn,
                                          int rows, int first, int stride, uint32_t ring)
      : kept(kept),
        bn(bn),
        left(rows - first),
        stride(stride),
        slot(ring),
        ring_begin(ring),
        ring_end(ring + C::kStages * C::kStageBytes) {
    const int window = first / kept;
    row = first - window * kept;
    source = base + window * window_pitch + int64_t{row} * bn;
    const int windows = stride / kept;
    row_jump = stride - windows * kept;
    jump = windows * window_pitch + int64_t{row_jump} * bn;
    wrap = window_pitch - int64_t{kept} * bn;
  }

  // kQuad: q * bk is a multiple of 4, so that the four rows lie in one window.
  template <bool kQuad>
  __device__ __forceinline__ void Issue() {
    const typename C::Weight* from = source;
    int r = row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      CopyAsync<C::kVectorBytes>(slot + i * C::kRowBytes, from, left > (kQuad ? 0 : i));
      from += bn;
      if (!kQuad && ++r == kept) r = 0, from += wrap;
    }
    CommitCopies();
    source += jump, row += row_jump, left -= stride;
    if (row >= kept) row -= kept, source += wrap;
    slot += C::kStageBytes;
    if (slot == ring_end) slot = ring_begin;
  }
  __device__ __forceinline__ void Issue(bool quad) { quad ? Issue<true>() : Issue<false>(); }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) BlockMmaKernel(Problem problem, MmaPlan plan) {
  using Value = typename C::Value;
  using Weight = typename C::Weight;
  using Tile = typename C::Tile;
  extern __shared__ __align__(128) unsigned char shared[];
  const Geometry& geometry = problem.geometry;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int column_warp = warp & (plan.column_warps - 1), group = warp / plan.column_warps;
  const int groups = C::kWarps / plan.column_warps;
  const int kept = geometry.q * geometry.bk;
  const int rows_per_window = geometry.window_units * geometry.bk;
  const bool quad = kept % 4 == 0;

  const int split = blockIdx.x % plan.splits;
  const int64_t tile_column = static_cast<int64_t>(blockIdx.x / plan.splits) * plan.column_warps * C::kWarpColumns;
  const int token0 = blockIdx.y * C::kTokens;
  const int tokens = static_cast<int>(min(int64_t{C::kTokens}, geometry.tokens - token0));
  const int64_t batch = blockIdx.z;
  const int window_begin = static_cast<int>(geometry.windows * split / plan.splits);
  const int window_end = static_cast<int>(geometry.windows * (split + 1) / plan.splits);

  const int64_t column = tile_column + column_warp * C::kWarpColumns;
  const bool active = column < geometry.out_blocks * geometry.bn;
  const int64_t block = active ? column / geometry.bn : 0;
  const int column_in_block = active ? static_cast<int>(column - block * geometry.bn) + lane % 8 * C::kVector : 0;
  const int rows = active ? (window_end - window_begin) * kept : 0;
  const int64_t window_pitch = geometry.out_blocks * kept * geometry.bn;
  // Row r of a step, chunk c: r * kRowBytes + (c ^ 2 * (r / 4)) * kVectorBytes, free of bank conflicts both ways.
  const uint32_t ring = warp * (C::kStages * C::kStageBytes);
  const uint32_t write = lane / 8 * (4 * C::kRowBytes) + (lane % 8 ^ lane / 8 * 2) * C::kVectorBytes;
  const uint32_t read = lane % 4 * (4 * C::kRowBytes) + (lane / 4 ^ lane % 4 * 2) * C::kVectorBytes;
  WeightStream<C> stream(static_cast<const Weight*>(problem.values.data) + batch * ValuesPerBatch(geometry) +
                             window_begin * window_pitch + block * kept * geometry.bn + column_in_block,
                         window_pitch, kept, geometry.bn, rows, group * C::kDepth + lane / 8 * 4, groups * C::kDepth,
                         SharedAddress(shared) + ring + write);
  const int first_block = static_cast<int>(tile_column / geometry.bn);
  const int blocks = static_cast<int>(min(int64_t{plan.blocks}, geometry.out_blocks - first_block));
  const uint32_t* mask = problem.mask + batch * MaskPerBatch(geometry) + int64_t{first_block} * geometry.mask_words;
  const int64_t mask_pitch = geometry.out_blocks * geometry.mask_words;
  const Divider divide_by_blocks(blocks);
  const Value* x =
      static_cast<const Value*>(problem.x.data) + (batch * geometry.tokens + token0) * geometry.in_features;
  unsigned char* const tiles = shared + C::kRingBytes;
  uint16_t* const tables = reinterpret_cast<uint16_t*>(tiles + 2 * Tile::kBytes);
  const int table_size = plan.blocks * plan.table_rows;

  Tile staged;
  // Thread 4 * i + j tabulates byte j of pair i of (window, block), and of pairs kPairs, 2 * kPairs ... further.
  constexpr int kPairs = C::kThreads / 4;
  const bool bytes = geometry.bk == 1 && geometry.window_units == kMaskBits;
  uint32_t words[2];
  auto word_at = [&](int window, int pair) {
    const int w = divide_by_blocks(pair);
    return mask + (window + w) * mask_pitch + (pair - w * blocks) * geometry.mask_words;
  };
  auto load = [&](int window) {
    const int count = min(plan.chunk_windows, window_end - window);
    const int64_t k = int64_t{window} * rows_per_window;
    staged.Load(x + k, geometry.in_features, tokens, geometry.in_features - k, count * rows_per_window, plan.aligned_x);
    if (!bytes) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = threadIdx.x / 4 + i * kPairs;
      words[i] = pair < count * blocks ? __ldg(word_at(window, pair)) : 0;
    }
  };
  auto store = [&](int window, int buffer) {
    const int count = min(plan.chunk_windows, window_end - window), pairs = count * blocks;
    staged.Store(tiles + buffer * Tile::kBytes, count * rows_per_window);
    uint16_t* const table = tables + buffer * table_size;
    auto place = [&](int pair, int w) { return table + (pair - w * blocks) * plan.table_rows + w * kept; };
    if (bytes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pair = threadIdx.x / 4 + i * kPairs, w = divide_by_blocks(pair);
        if (pair < pairs) TabulateByte<Tile>(place(pair, w), kept, words[i], threadIdx.x % 4, w * kMaskBits);
      }
#pragma unroll 1
      for (int pair = threadIdx.x / 4 + 2 * kPairs; pair < pairs; pair += kPairs) {
        const int w = divide_by_blocks(pair);
        TabulateByte<Tile>(place(pair, w), kept, __ldg(word_at(window, pair)), threadIdx.x % 4, w * kMaskBits);
      }
    } else {
#pragma unroll 1
      for (int pair = threadIdx.x; pair < pairs; pair += C::kThreads) {
        const int w = divide_by_blocks(pair);
        TabulateWindow<Tile>(place(pair, w), geometry.q, geometry.bk, geometry.window_units, word_at(window, pair),
                             w * rows_per_window);
      }
    }
    for (int b = warp; b < blocks; b += C::kWarps) {  // the last step may be short
      const int row = count * kept + lane;
      if (lane < C::kDepth && row < plan.table_rows) table[b * plan.table_rows + row] = Tile::kZeroRow;
    }
  };

  float sums[C::kVector / 2][C::kTokenTiles][4] = {};
  if (threadIdx.x < 16) {
    const int buffer = threadIdx.x / 8, unit = threadIdx.x % 8;
    *reinterpret_cast<uint4*>(tiles + buffer * Tile::kBytes + Tile::kZeroRow + unit * 16) = make_uint4(0, 0, 0, 0);
  }
  // The first x and mask before the weights, behind whose queue they would otherwise wait.
  if (window_begin < window_end) load(window_begin);
#pragma unroll 1
  for (int s = 0; s < C::kStages - 1; ++s) stream.Issue(quad);
  if (window_begin < window_end) store(window_begin, 0);
  __syncthreads();

  // Row r of 8x8 tile i, as ldmatrix counts: mma depth index r (i even) or 8 + r (i odd).
  const int table_offset = (lane % 8 / 2) * 4 + lane % 2 + lane / 8 % 2 * 2 +
                           (active ? static_cast<int>(block - first_block) * plan.table_rows : 0);
  const unsigned char* const ring_begin = shared + ring + read;
  const unsigned char* slot = ring_begin;
  int step = group;  // counted from window_begin
  for (int window = window_begin, buffer = 0; window < window_end; window += plan.chunk_windows, buffer ^= 1) {
    const int next = window + plan.chunk_windows;
    if (C::kEarly && next < window_end) load(next);
    const int chunk_step = (window - window_begin) * kept / C::kDepth;
    const int end_row = min((next - window_begin) * kept, rows);
    const uint32_t tile = SharedAddress(tiles + buffer * Tile::kBytes);
    const uint16_t* table = tables + buffer * table_size + table_offset + (step - chunk_step) * C::kDepth;
    for (; step * C::kDepth < end_row; step += groups, table += groups * C::kDepth) {
      const uint32_t row = (tile + *table) ^ (C::kTokenTiles > 1 ? lane / 16 * 16 : 0);
      WaitForCopies<C::kStages - 2>();
      __syncwarp();
      uint32_t w[4][C::kWords];
#pragma unroll
      for (int i = 0; i < 4; ++i) LoadWords(w[i], slot + i * C::kRowBytes);
      slot += C::kStageBytes;
      if (slot == ring_begin + C::kStages * C::kStageBytes) slot = ring_begin;
      stream.Issue(quad);  // into the slot of the step before, whose values have been multiplied
      uint32_t b[C::kTokenTiles][2];
      if constexpr (C::kTokenTiles == 1) {
        LoadTransposed(b[0], row);
      } else {
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; n += 2) {
          uint32_t both[4];
          LoadTransposed(both, row ^ (n * 16));
          b[n][0] = both[0], b[n][1] = both[1], b[n + 1][0] = both[2], b[n + 1][1] = both[3];
        }
      }
#pragma unroll
      for (int i = 0; i < C::kVector / 2; ++i) {
        const auto pair = [&](int row, int column) {
          constexpr int kPerWord = 4 / sizeof(Weight);
          const int word = column / kPerWord, element = column % kPerWord;
          if constexpr (sizeof(Weight) == 2) {
            return PairUp(w[row][word], w[row + 1][word], element);
          } else {
            return WidenPair<Value, Weight>(w[row][word], w[row + 1][word], element);
          }
        };
        const uint32_t a[4] = {pair(0, 2 * i), pair(0, 2 * i + 1), pair(2, 2 * i), pair(2, 2 * i + 1)};
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) Mma<Value>(sums[i][n], a, b[n][0], b[n][1]);
      }
    }
    if (next < window_end) {
      if (!C::kEarly) load(next);
      store(next, buffer ^ 1);
    }
    __syncthreads();
  }

  // Partial sums [group][token][column], then the groups, then the cluster.
  WaitForCopies<0>();
  __syncthreads();
  const int columns = plan.column_warps * C::kWarpColumns, pitch = columns + 4;
  float* const partial = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int n = 0; n < C::kTokenTiles; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int token = n * 8 + lane % 4 * 2 + odd;
      if (token < tokens) {
        float* out = partial + (group * tokens + token) * pitch + column_warp * C::kWarpColumns + lane / 4 * C::kVector;
#pragma unroll
        for (int i = 0; i < C::kVector / 2; ++i) {
          *reinterpret_cast<float2*>(out + 2 * i) = make_float2(sums[i][n][odd], sums[i][n][2 + odd]);
        }
      }
    }
  }
  CombineAndStore<C::kThreads>(problem, partial, token0, tokens, tile_column, columns, groups, split, plan.splits);
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MMA_CUH_
