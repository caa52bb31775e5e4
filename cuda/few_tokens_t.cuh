// dx = g Wᵀ for few tokens on CUDA cores, in float32: every pattern, values read once.
//
//   dx[t, k] = sum over columns c whose column block keeps row k: g[t, c] * W[k, c]
//
// A lane owns kColumns neighbouring columns of one column block and walks down their kept rows in one window (a load is
// kRows rows of them, contiguous in memory). A kept row yields one number per token, its sum over the lane's columns,
// which is added to the lane's own copy of the window, float [row][lane][kTokens] in shared memory: lanes never share a
// word or a bank whatever rows they hold, so there is nothing to order and there are no atomics. After the last column
// the copies of all lanes, warps and blocks of the cluster are added in a fixed order.
//
// A block of threads owns one window (its rows of dx) and a share of the column tiles (32 * kColumns columns), which
// its warps take in turn; a cluster of `splits` blocks shares a window. Values travel through a lane-private ring as in
// block_simt.cuh, across tiles.
// Grid: (windows * splits, token tiles, batch), clusters of `splits` along x.
//
// Windows of more rows than fit (large bk, long windows) are cut into segments of whole units, or of rows of one unit;
// the grid then counts segments, and lanes find their first kept row of a segment from the mask (kWhole is false:
// slower).
//
// Shared memory, bytes:
//   0                              ring    kWarps * kStages * 32 * kLoadBytes
//   kRingBytes                     copies  4 * kWarps * rows * 32 * kTokens
//   ... + the copies               sums    4 * rows * kTokens
// Synchronisation: barriers around the final sums only.
#ifndef JAX_NMSPARSE_CUDA_FEW_TOKENS_T_CUH_
#define JAX_NMSPARSE_CUDA_FEW_TOKENS_T_CUH_

#include "cuda/block_simt.cuh"

namespace nmsparse::cuda::block {

template <class Value, int kColumns, int kRows, int kTokens, bool kUnitRows>
struct TransposedConfig : SimtConfig<Value, kColumns, kRows, kTokens, kUnitRows> {
  using Base = SimtConfig<Value, kColumns, kRows, kTokens, kUnitRows>;
  static constexpr int kStages = Base::kAsync ? 8 : 0;  // the copies of the window need the room
  static constexpr int kRingBytes = Base::kWarps * kStages * Base::kStageBytes;
};

struct TransposedPlan {
  int32_t splits;
  int32_t units;     // of a segment
  int32_t rows;      // of a unit in a segment; rows of a segment = units * rows
  int32_t segments;  // of a window
};

__device__ __forceinline__ float LoadFloatFromBlock(uint32_t address, int block) {
  float v;
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote) : "memory");
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
#endif
  return v;
}

// kTokens neighbouring floats to shared memory.
template <int kTokens>
__device__ __forceinline__ void StoreTokens(float* to, const float (&v)[kTokens]) {
  if constexpr (kTokens == 4) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(v);
  } else if constexpr (kTokens == 2) {
    *reinterpret_cast<float2*>(to) = *reinterpret_cast<const float2*>(v);
  } else {
    *to = v[0];
  }
}

// g of the lane's columns in one tile. Where they are few they are read one tile ahead, as raw bits.
template <class C>
struct GTile {
  static constexpr bool kAhead = C::kColumns == 1;
  float now[C::kTokens][C::kColumns];
  uint32_t ahead[C::kTokens];

  __device__ __forceinline__ void Read(const Operand& g, int64_t first, int64_t pitch, int tokens, int64_t columns) {
    WithInputType(g.dtype, [&](auto zero) {
      using G = decltype(zero);
      const G* source = static_cast<const G*>(g.data) + first;
#pragma unroll
      for (int t = 0; t < C::kTokens; ++t, source += pitch) {
        const int count = t < tokens ? static_cast<int>(min(columns, int64_t{C::kColumns})) : 0;
        if constexpr (C::kColumns % 8 == 0 && sizeof(G) >= 2) {
          LoadRun<C::kColumns>(source, count, now[t]);
        } else {
#pragma unroll
          for (int c = 0; c < C::kColumns; ++c) now[t][c] = c < count ? ToFloat(source[c]) : 0.0f;
        }
      }
    });
  }
  __device__ __forceinline__ void ReadAhead(const Operand& g, int64_t first, int64_t pitch, int tokens,
                                            int64_t columns) {
#pragma unroll
    for (int t = 0; t < C::kTokens; ++t) {
      const int64_t at = first + t * pitch;
      ahead[t] = 0;
      if (t < tokens && columns > 0) {
        ahead[t] = g.dtype == DType::kF32 ? __ldg(static_cast<const uint32_t*>(g.data) + at)
                                          : __ldg(static_cast<const uint16_t*>(g.data) + at);
      }
    }
  }
  __device__ __forceinline__ void Arrive(DType dtype) {
#pragma unroll
    for (int t = 0; t < C::kTokens; ++t) {
      now[t][0] = dtype == DType::kF32    ? __uint_as_float(ahead[t])
                  : dtype == DType::kBF16 ? __uint_as_float(ahead[t] << 16)
                                          : __half2float(__ushort_as_half(static_cast<uint16_t>(ahead[t])));
    }
  }
};

template <class C, bool kWhole>
__global__ void __launch_bounds__(C::kThreads, 2) TransposedKernel(Problem problem, TransposedPlan plan) {
  using Value = typename C::Value;
  extern __shared__ __align__(128) unsigned char shared[];
  float* const copies = reinterpret_cast<float*>(shared + C::kRingBytes);
  const Geometry& geometry = problem.geometry;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int kept = geometry.q * geometry.bk, rows = plan.units * plan.rows;
  const int split = blockIdx.x % plan.splits, item = blockIdx.x / plan.splits;
  const int window = kWhole ? item : item / plan.segments, segment = kWhole ? 0 : item - window * plan.segments;
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * C::kTokens, batch = blockIdx.z;
  const int tokens = static_cast<int>(min(int64_t{C::kTokens}, geometry.tokens - token0));
  const int tiles = static_cast<int>(CeilDiv(geometry.out_blocks * geometry.bn, C::kTileColumns));
  const int tile_begin = static_cast<int>(int64_t{tiles} * split / plan.splits);
  const int tile_end = static_cast<int>(int64_t{tiles} * (split + 1) / plan.splits);

  for (int e = threadIdx.x; e < C::kWarps * rows * kWarpSize * C::kTokens / 4; e += C::kThreads) {
    reinterpret_cast<float4*>(copies)[e] = make_float4(0, 0, 0, 0);
  }
  __syncthreads();

  const Value* const values = static_cast<const Value*>(problem.values.data) + batch * ValuesPerBatch(geometry) +
                              int64_t{window} * geometry.out_blocks * kept * geometry.bn;
  const uint32_t* const mask =
      problem.mask + batch * MaskPerBatch(geometry) + int64_t{window} * geometry.out_blocks * geometry.mask_words;
  const int64_t g_first = (batch * geometry.tokens + token0) * geometry.out_features;
  float* const copy = copies + (warp * rows * kWarpSize + lane) * C::kTokens;
  constexpr int kPitch = kWarpSize * C::kTokens;
  const int columns_stored = static_cast<int>(geometry.out_blocks) * geometry.bn;

  auto block_of = [&](int column) { return geometry.bn == 1 ? column : column / geometry.bn; };
  auto values_of = [&](int tile) {
    const int column = tile * C::kTileColumns + lane * C::kColumns;
    const int block = block_of(column);
    return values + int64_t{block} * kept * geometry.bn + (column - block * geometry.bn);
  };
  auto active = [&](int tile) {
    return tile < tile_end && tile * C::kTileColumns + lane * C::kColumns < columns_stored;
  };
  auto words_of = [&](int tile) {
    return mask + int64_t{block_of(tile * C::kTileColumns + lane * C::kColumns)} * geometry.mask_words;
  };
  GTile<C> g;
  auto g_at = [&](int tile) { return g_first + tile * C::kTileColumns + lane * C::kColumns; };
  auto g_left = [&](int tile) { return geometry.out_features - (tile * C::kTileColumns + lane * C::kColumns); };
  // One load of values, kRows rows whose places in the lane's copy are `at`.
  auto accumulate = [&](const SimtLoad<C>& now, float* const(&at)[C::kRows]) {
    float sum[C::kRows][C::kTokens];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) LoadTokens(sum[r], at[r]);
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kColumns; ++c) {
        const float value = ToFloat(now.v[r][c]);
#pragma unroll
        for (int t = 0; t < C::kTokens; ++t) sum[r][t] = fmaf(value, g.now[t][c], sum[r][t]);
      }
    }
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) StoreTokens(at[r], sum[r]);
  };

  if constexpr (kWhole) {
    // Tiles of a warp: tile_begin + warp, every kWarps-th; only the last may have idle lanes.
    int tile = tile_begin + warp, read_tile = tile, read_left = kept / C::kRows, left = 0;
    // Unit rows are walked from the last kept row to the first: the highest bit of a mask takes one instruction to
    // find.
    const int64_t first_load = C::kUnitRows ? int64_t{kept - C::kRows} * geometry.bn : 0;
    const int to_next = (C::kUnitRows ? -C::kRows : C::kRows) * geometry.bn;
    const Value* source = active(tile) ? values_of(tile) + first_load : values;
    auto advance = [&] {
      source += to_next;
      if (--read_left == 0) {
        read_tile += C::kWarps, read_left = kept / C::kRows;
        if (active(read_tile)) source = values_of(read_tile) + first_load;
      }
    };
    RowCursor<C::kUnitRows> cursor;
    uint32_t bits = 0, next_bits = 0;
    const uint32_t last_unit = geometry.window_units - 1;
    const uint32_t valid = geometry.window_units < kMaskBits ? (1u << geometry.window_units) - 1 : 0xffffffffu;
    if (active(tile)) {
      if constexpr (C::kUnitRows) next_bits = __ldg(words_of(tile));
      if constexpr (GTile<C>::kAhead) g.ReadAhead(problem.g, g_at(tile), geometry.out_features, tokens, g_left(tile));
    }
    auto consume = [&](const SimtLoad<C>& now) {
      if (left == 0) {
        left = kept / C::kRows;
        const int next = tile + C::kWarps;
        if constexpr (GTile<C>::kAhead) {
          g.Arrive(problem.g.dtype);
          if (active(next)) g.ReadAhead(problem.g, g_at(next), geometry.out_features, tokens, g_left(next));
        } else {
          g.Read(problem.g, g_at(tile), geometry.out_features, tokens, g_left(tile));
        }
        if constexpr (C::kUnitRows) {
          bits = next_bits & valid;
          if (active(next)) next_bits = __ldg(words_of(next));
        } else {
          cursor.Start(geometry, words_of(tile), 0, 1, 0);
        }
        tile = next;
      }
      --left;
      float* at[C::kRows];
#pragma unroll
      for (int i = 0; i < C::kRows; ++i) {
        const int r = C::kUnitRows ? C::kRows - 1 - i : i;
        uint32_t row;
        if constexpr (C::kUnitRows) {
          row = min(31u - __clz(bits), last_unit);  // no bit left, in a corrupt mask: the last unit
          bits &= ~(1u << row);
        } else {
          row = cursor.Next(geometry);
        }
        at[r] = copy + row * kPitch;
      }
      accumulate(now, at);
    };
    if constexpr (C::kAsync) {
      unsigned char* const ring = shared + warp * (C::kStages * C::kStageBytes) + lane * C::kLoadBytes;
      const unsigned char* const ring_end = ring + C::kStages * C::kStageBytes;
      unsigned char* fill = ring;
      auto issue = [&] {
        if (active(read_tile)) {
          CopyAsync<C::kLoadBytes>(SharedAddress(fill), source, true);
          advance();
        }
        CommitCopies();
        fill += C::kStageBytes;
        if (fill == ring_end) fill = ring;
      };
#pragma unroll 1
      for (int i = 0; i < C::kStages - 1; ++i) issue();
      const unsigned char* slot = ring;
      while (left > 0 || active(tile)) {
        WaitForCopies<C::kStages - 2>();
        SimtLoad<C> now;
        now.Read(reinterpret_cast<const Value*>(slot));
        slot += C::kStageBytes;
        if (slot == ring_end) slot = ring;
        issue();
        consume(now);
      }
      WaitForCopies<0>();
    } else {
      while (left > 0 || active(tile)) {
        SimtLoad<C> now;
        now.Read(source);
        advance();
        consume(now);
      }
    }
  } else {
    static_assert(kWhole || C::kRows == 1, "a segment may begin at any kept row");
    const int first_unit = plan.rows < geometry.bk
                               ? segment / (geometry.bk / plan.rows + (geometry.bk % plan.rows != 0))
                               : segment * plan.units;
    const int per_unit = (geometry.bk + plan.rows - 1) / plan.rows;
    const int first_row = plan.rows < geometry.bk ? segment % per_unit * plan.rows : 0;
    const int last_row = min(first_row + plan.rows, geometry.bk);
    for (int tile = tile_begin + warp; active(tile); tile += C::kWarps) {
      g.Read(problem.g, g_at(tile), geometry.out_features, tokens, g_left(tile));
      const uint32_t* words = words_of(tile);
      int rank = 0;
      for (int i = 0; i < first_unit / kMaskBits; ++i) rank += __popc(words[i]);
      if (first_unit % kMaskBits != 0)
        rank += __popc(words[first_unit / kMaskBits] & ((1u << first_unit % kMaskBits) - 1));
      const int end_unit = min(first_unit + plan.units, geometry.window_units);
      for (int unit = first_unit; unit < end_unit && rank < geometry.q; ++unit) {
        if ((words[unit / kMaskBits] >> unit % kMaskBits & 1) == 0) continue;
        const Value* source = values_of(tile) + (int64_t{rank} * geometry.bk + first_row) * geometry.bn;
#pragma unroll 4
        for (int r = first_row; r < last_row; ++r, source += geometry.bn) {
          SimtLoad<C> now;
          now.Read(source);
          float* at[1] = {copy + ((unit - first_unit) * plan.rows + r - first_row) * kPitch};
          accumulate(now, at);
        }
        ++rank;
      }
    }
  }

  // Lanes and warps, then the cluster.
  __syncthreads();
  float* const totals = copies + C::kWarps * rows * kPitch;
  for (int row = warp; row < rows; row += C::kWarps) {
    float sum[C::kTokens] = {};
    for (int w = 0; w < C::kWarps; ++w) {
      float v[C::kTokens];
      LoadTokens(v, copies + ((w * rows + row) * kWarpSize + lane) * C::kTokens);
#pragma unroll
      for (int t = 0; t < C::kTokens; ++t) sum[t] += v[t];
    }
#pragma unroll
    for (int t = 0; t < C::kTokens; ++t) {
#pragma unroll
      for (int d = kWarpSize / 2; d > 0; d /= 2) sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], d);
      if (lane == 0) totals[t * rows + row] = sum[t];
    }
  }
  SyncCluster(plan.splits);
  for (int e = split * C::kThreads + threadIdx.x; e < tokens * rows; e += plan.splits * C::kThreads) {
    const int t = e / rows, row = e - t * rows;
    float sum = 0;
    for (int s = 0; s < plan.splits; ++s) sum += LoadFloatFromBlock(SharedAddress(totals + e), s);
    int64_t k = int64_t{window} * geometry.window_units * geometry.bk + row;
    bool inside = true;
    if constexpr (!kWhole) {
      const int per_unit = (geometry.bk + plan.rows - 1) / plan.rows;
      const int unit = plan.rows < geometry.bk ? segment / per_unit : segment * plan.units + row / plan.rows;
      const int in_unit = plan.rows < geometry.bk ? segment % per_unit * plan.rows + row : row % plan.rows;
      inside = unit < geometry.window_units && in_unit < geometry.bk;
      k = (int64_t{window} * geometry.window_units + unit) * geometry.bk + in_unit;
    }
    if (inside && k < geometry.in_features) {
      StoreResult(problem.result, (batch * geometry.tokens + token0 + t) * geometry.in_features + k, sum);
    }
  }
  SyncCluster(plan.splits);
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_FEW_TOKENS_T_CUH_
