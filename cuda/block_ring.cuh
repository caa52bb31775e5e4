// y = act((x W) * scales + bias) for up to 64 tokens, W vector-wise or block-wise with columns in multiples of 64, on
// sm_90: weights by the copy engine into rings, x gathered from its natural order.
//
//   y[t, c] = sum over kept rows k of c's column block: x[t, k] * W[k, c]
//
// A consumer warp owns 64 columns of one block and takes steps of up to 16 kept rows: plan.box_rows rows of each of
// plan.step_windows windows, one copy of a box [windows][rows][64 columns], 128 bytes a row, swizzled. Lines of a step
// that no row fills are zeros from the start on and are never written. A (weights) comes by ldmatrix.trans as it is:
// mma row = column of W, mma depth = line of the box. B (x) is read element by element: a lane needs x[token 8n + g] at
// the rows of lines 2t, 2t + 1, 2t + 8, 2t + 9, which a table names.
//
// x is staged plan.chunk_windows windows at a time by producer warps, which also write the table; chunks
// alternate between two buffers. So consumers never wait for each other, and the rings (kStages boxes per warp,
// refilled by the lane that just read) run on while x is staged.
//
// Depth is split over the warps (groups of column_warps take the steps in turn) and over a cluster of `splits` blocks
// (windows, in whole steps); partial sums are added in a fixed order. Grid: (column tiles * splits, token tiles,
// batch).
//
// Shared memory, bytes:
//   0                      rings   kWarps * kStages * 2,048
//   kRingBytes             barriers: full[kWarps][kStages], chunk full[2], chunk empty[2]
//   ... + kBarrierBytes    x       2 * kTokens * kPitch    [token][row of the chunk], then one zero
//   ... + 2 * kXBytes      tables  2 * blocks * chunk_steps * 16 uint16: byte offset of the row, per line of each step
//   after the last step everything is reused: sums [warp groups][tokens][columns + 4] float
#ifndef JAX_NMSPARSE_CUDA_BLOCK_RING_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_RING_CUH_

#include "cuda/block_tiles.cuh"
#include "cuda/tma.cuh"

namespace nmsparse::cuda::block {

template <class Value_, int kTokenTiles_>
struct RingConfig {
  using Value = Value_;
  static constexpr int kTokenTiles = kTokenTiles_;  // 8 tokens each
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kWarps = 8;  // consumers
  static constexpr int kProducers = 4 * kWarpSize;
  static constexpr int kThreads = kWarps * kWarpSize + kProducers;
  static constexpr int kDepth = 16;  // lines of a step
  static constexpr int kWarpColumns = 64;
  static constexpr int kLineBytes = 2 * kWarpColumns;
  static constexpr int kStageBytes = kDepth * kLineBytes;
  static constexpr int kStages = kTokenTiles <= 4 ? 6 : 4;
  static constexpr bool kEarly = kTokenTiles <= 4;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kChunkRows = kTokenTiles <= 2 ? 1024 : 512;
  static constexpr int kPitch = kChunkRows * 2 + 16;  // tokens begin four banks apart
  static constexpr int kZero = kChunkRows * 2;        // offset of the zero behind a token's rows
  static constexpr int kXBytes = kTokens * kPitch;
  static constexpr int kTables = kRingBytes + kBarrierBytes + 2 * kXBytes;
  static_assert(sizeof(Value) == 2, "fragments are built from 16-bit elements");
  static_assert((kWarps * kStages + 4) * 8 <= kBarrierBytes, "room for the barriers");
};

// Chosen by the launcher (block_ring.cu).
struct RingPlan {
  int32_t column_warps;      // warps side by side
  int32_t splits;            // blocks of a cluster
  int32_t step_windows;      // of a step; 1 where a window takes one step or more
  int32_t box_rows;          // kept rows of each of them
  int32_t steps_per_window;  // more than 1 only where step_windows is 1
  int32_t chunk_windows;     // a multiple of step_windows
  int32_t blocks;            // column blocks that a block of threads touches
  bool aligned_x;            // rows of x can be read 16 bytes at a time
};

// Four 8x8 tiles as LoadTransposed(uint32_t (&)[4], ...), of which lane 8 * i + r names row r of tile i.
template <class C>
__device__ __forceinline__ void LoadWeights(uint32_t (&a)[4], uint32_t stage, int lane, int tile) {
  const int line = lane % 8 + lane / 16 * 8, chunk = tile * 2 + lane / 8 % 2;
  LoadTransposed(a, stage + line * C::kLineBytes + ((chunk ^ line % 8) * 16));
}

// The producers: x of a chunk into `staged`.
template <class C>
__device__ __forceinline__ void StageX(const Problem& problem, const RingPlan& plan, int64_t row, int rows,
                                       int64_t first_token, int tokens, int thread, unsigned char* staged) {
  using Value = typename C::Value;
  const Geometry& geometry = problem.geometry;
  const Value* x = static_cast<const Value*>(problem.x.data) + first_token * geometry.in_features + row;
  const int64_t left = geometry.in_features - row;
  if (plan.aligned_x) {
    constexpr int kVector = 8;
    const int vectors = rows / kVector;
    const Divider token_of(vectors);
    for (int i = thread; i < C::kTokens * vectors; i += C::kProducers) {
      const int token = token_of(i), k = (i - token * vectors) * kVector;
      const bool present = token < tokens && k < left;
      CopyAsync<16>(SharedAddress(staged + token * C::kPitch + k * 2),
                    present ? x + token * geometry.in_features + k : x, present);
    }
  } else {
    const Divider token_of(rows);
    for (int i = thread; i < C::kTokens * rows; i += C::kProducers) {
      const int token = token_of(i), k = i - token * rows;
      const bool present = token < tokens && k < left;
      reinterpret_cast<Value*>(staged + token * C::kPitch)[k] =
          present ? x[token * geometry.in_features + k] : Value(0.0f);
    }
  }
}

// The table of one (window, block): entry line(i) of kept row i, in the order of the values. Missing bits name the
// zero, surplus bits are ignored.
template <class C>
__device__ __forceinline__ void Tabulate(const Geometry& geometry, const RingPlan& plan, uint16_t* steps, int window,
                                         const uint32_t* words, uint32_t first_word) {
  const int first_row = window * geometry.window_units * geometry.bk;
  uint16_t* const lines = steps + window / plan.step_windows * plan.steps_per_window * C::kDepth +
                          window % plan.step_windows * plan.box_rows;
  int line = 0, step = 0;
  auto put = [&](int offset) {
    lines[step * C::kDepth + line] = static_cast<uint16_t>(offset);
    if (++line == plan.box_rows) line = 0, ++step;
  };
  int rank = 0;
#pragma unroll 1
  for (int base = 0; base < geometry.window_units; base += kMaskBits) {
    uint32_t bits = words == nullptr ? 0 : base == 0 ? first_word : __ldg(words + base / kMaskBits);
    if (geometry.window_units - base < kMaskBits) bits &= (1u << (geometry.window_units - base)) - 1;
#pragma unroll 1
    for (; bits != 0 && rank < geometry.q; ++rank, bits &= bits - 1) {
      const int row = first_row + (base + __ffs(bits) - 1) * geometry.bk;
#pragma unroll 1
      for (int i = 0; i < geometry.bk; ++i) put(2 * (row + i));
    }
  }
#pragma unroll 1
  for (int i = rank * geometry.bk; i < geometry.q * geometry.bk; ++i) put(C::kZero);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    BlockRingKernel(const __grid_constant__ Problem problem, const RingPlan plan,
                    const __grid_constant__ CUtensorMap map) {
  using Value = typename C::Value;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Geometry& geometry = problem.geometry;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int split = blockIdx.x % plan.splits;
  const int64_t tile_column = static_cast<int64_t>(blockIdx.x / plan.splits) * plan.column_warps * C::kWarpColumns;
  const int token0 = blockIdx.y * C::kTokens;
  const int tokens = static_cast<int>(min(int64_t{C::kTokens}, geometry.tokens - token0));
  const int64_t batch = blockIdx.z;
  const int64_t window_steps = CeilDiv(geometry.windows, plan.step_windows);
  const int window_begin = static_cast<int>(window_steps * split / plan.splits) * plan.step_windows;
  const int window_end =
      static_cast<int>(min(geometry.windows, (window_steps * (split + 1) / plan.splits) * plan.step_windows));
  const int steps = static_cast<int>(CeilDiv(window_end - window_begin, plan.step_windows)) * plan.steps_per_window;
  const int chunk_steps = plan.chunk_windows / plan.step_windows * plan.steps_per_window;
  const int first_block = static_cast<int>(tile_column / geometry.bn);

  const uint32_t ring = SharedAddress(shared) + warp * (C::kStages * C::kStageBytes);
  const uint32_t barriers = SharedAddress(shared) + C::kRingBytes;
  const uint32_t full = barriers + warp * (C::kStages * 8);
  const uint32_t chunk_full = barriers + C::kWarps * C::kStages * 8, chunk_empty = chunk_full + 16;
  unsigned char* const staged = shared + C::kRingBytes + C::kBarrierBytes;
  uint16_t* const tables = reinterpret_cast<uint16_t*>(shared + C::kTables);
  const int table_size = plan.blocks * chunk_steps * C::kDepth;

  // Consumers: this warp's columns and steps.
  const int groups = C::kWarps / plan.column_warps;
  const int group = warp / plan.column_warps, column_warp = warp - group * plan.column_warps;
  const int64_t column = tile_column + column_warp * C::kWarpColumns;
  const bool active = warp < groups * plan.column_warps && column < geometry.out_blocks * geometry.bn;
  const int block = active ? static_cast<int>(column / geometry.bn) : 0;
  const int column_in_block = active ? static_cast<int>(column - int64_t{block} * geometry.bn) : 0;
  const uint32_t box_bytes = plan.step_windows * plan.box_rows * C::kLineBytes;
  auto fill = [&](int step, int slot) {
    const int turn = plan.steps_per_window == 1 ? step : step / plan.steps_per_window;
    BarrierArriveExpect(full + slot * 8, box_bytes);
    LoadBox(ring + slot * C::kStageBytes, &map, full + slot * 8, column_in_block,
            (step - turn * plan.steps_per_window) * plan.box_rows, window_begin + turn * plan.step_windows, block,
            static_cast<int>(batch));
  };

  if (warp < C::kWarps) {
    // Lines that no box fills.
    const int lines = plan.step_windows * plan.box_rows;
    for (int i = lines * 8 + lane; i < C::kDepth * 8; i += kWarpSize) {
#pragma unroll
      for (int slot = 0; slot < C::kStages; ++slot) {
        *reinterpret_cast<uint4*>(shared + warp * (C::kStages * C::kStageBytes) + slot * C::kStageBytes + i * 16) =
            make_uint4(0, 0, 0, 0);
      }
    }
    if (lane == 0) {
      for (int slot = 0; slot < C::kStages; ++slot) BarrierInit(full + slot * 8, 1);
      BarrierInitFence();
      if (active) {
        for (int slot = 0; slot < C::kStages; ++slot) {
          if (group + slot * groups < steps) fill(group + slot * groups, slot);
        }
      }
    }
  } else {
    if (threadIdx.x == C::kWarps * kWarpSize) {
      for (int i = 0; i < 2; ++i) {
        BarrierInit(chunk_full + i * 8, 2 * C::kProducers);
        BarrierInit(chunk_empty + i * 8, C::kWarps);
      }
      BarrierInitFence();
    }
    const int thread = threadIdx.x - C::kWarps * kWarpSize;
    for (int i = thread; i < 2 * C::kTokens; i += C::kProducers) {
      *reinterpret_cast<uint4*>(staged + i * C::kPitch + C::kZero) = make_uint4(0, 0, 0, 0);
    }
    for (int i = thread; i < 2 * table_size; i += C::kProducers) tables[i] = C::kZero;
  }
  __syncthreads();

  float sums[4][C::kTokenTiles][4] = {};
  if (warp >= C::kWarps) {
    const int thread = threadIdx.x - C::kWarps * kWarpSize;
    const int blocks = static_cast<int>(min(int64_t{plan.blocks}, geometry.out_blocks - first_block));
    const uint32_t* mask = problem.mask + batch * MaskPerBatch(geometry) + int64_t{first_block} * geometry.mask_words;
    const int64_t mask_pitch = geometry.out_blocks * geometry.mask_words;
    const int rows_per_window = geometry.window_units * geometry.bk;
    const Divider window_of(blocks);
    const int w = window_of(thread), b = thread - w * blocks;  // one pair each: the plan sees to that
    RingPosition position;
    for (int window = window_begin; window < window_end; window += plan.chunk_windows) {
      const int present = min(plan.chunk_windows, window_end - window);
      const uint32_t* const words = w < present ? mask + (window + w) * mask_pitch + b * geometry.mask_words : nullptr;
      const uint32_t word = words != nullptr ? __ldg(words) : 0;
      BarrierWait(chunk_empty + position.slot * 8, position.parity ^ 1);
      StageX<C>(problem, plan, int64_t{window} * rows_per_window, present * rows_per_window,
                batch * geometry.tokens + token0, tokens, thread, staged + position.slot * C::kXBytes);
      BarrierArriveAfterCopies(chunk_full + position.slot * 8);
      if (w < plan.chunk_windows) {
        Tabulate<C>(geometry, plan, tables + position.slot * table_size + b * chunk_steps * C::kDepth, w, words, word);
      }
      BarrierArrive(chunk_full + position.slot * 8);
      position.Advance(2);
    }
  } else {
    const int g = lane / 4, t = lane % 4;
    const int table_offset = (block - first_block) * chunk_steps * C::kDepth + 2 * t;
    RingPosition chunk, slot;
    int step = group;
    for (int begin = 0; begin < steps; begin += chunk_steps) {
      BarrierWait(chunk_full + chunk.slot * 8, chunk.parity);
      const int end = active ? min(begin + chunk_steps, steps) : 0;
      const unsigned char* const x = staged + chunk.slot * C::kXBytes + g * C::kPitch;
      const uint16_t* const table = tables + chunk.slot * table_size + table_offset;
      for (; step < end; step += groups) {
        const uint16_t* const lines = table + (step - begin) * C::kDepth;
        const uint32_t low = *reinterpret_cast<const uint32_t*>(lines);
        const uint32_t high = *reinterpret_cast<const uint32_t*>(lines + 8);
        const unsigned char* const x0 = x + (low & 0xffffu);
        const unsigned char* const x1 = x + (low >> 16);
        const unsigned char* const x2 = x + (high & 0xffffu);
        const unsigned char* const x3 = x + (high >> 16);
        auto at = [](const unsigned char* p, int n) -> uint32_t {
          return *reinterpret_cast<const uint16_t*>(p + n * 8 * C::kPitch);
        };
        // x before the wait for the weights, where registers allow.
        uint32_t b[C::kTokenTiles][2];
        auto gather = [&](int n) {
          b[n][0] = PairUp(at(x0, n), at(x1, n), 0);
          b[n][1] = PairUp(at(x2, n), at(x3, n), 0);
        };
        if constexpr (C::kEarly) {
#pragma unroll
          for (int n = 0; n < C::kTokenTiles; ++n) gather(n);
        }
        BarrierWait(full + slot.slot * 8, slot.parity);
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) LoadWeights<C>(a[i], ring + slot.slot * C::kStageBytes, lane, i);
        __syncwarp();
        if (lane == 0 && step + C::kStages * groups < steps) fill(step + C::kStages * groups, slot.slot);
        slot.Advance(C::kStages);
#pragma unroll
        for (int n = 0; n < C::kTokenTiles; ++n) {
          if constexpr (!C::kEarly) gather(n);
#pragma unroll
          for (int i = 0; i < 4; ++i) Mma<Value>(sums[i][n], a[i], b[n][0], b[n][1]);
        }
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(chunk_empty + chunk.slot * 8);
      chunk.Advance(2);
    }
  }

  // Partial sums [group][token][column], then the groups, then the cluster.
  __syncthreads();
  const int columns = plan.column_warps * C::kWarpColumns, pitch = columns + 4;
  float* const partial = reinterpret_cast<float*>(shared);
  if (warp < groups * plan.column_warps) {
#pragma unroll
    for (int n = 0; n < C::kTokenTiles; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int token = n * 8 + lane % 4 * 2 + odd;
        if (token < tokens) {
          float* out = partial + (group * tokens + token) * pitch + column_warp * C::kWarpColumns + lane / 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) out[16 * i] = sums[i][n][odd], out[16 * i + 8] = sums[i][n][2 + odd];
        }
      }
    }
  }
  CombineAndStore<C::kThreads>(problem, partial, token0, tokens, tile_column, columns, groups, split, plan.splits);
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_RING_CUH_
