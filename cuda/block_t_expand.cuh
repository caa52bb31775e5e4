// Many tokens times transposed vector-wise (1, L) weights of high density on Hopper's tensor cores, feature-major:
//
//   dxᵀ[i, t] = sum_b sum_c W[i, b, c] gᵀ[b, c, t]        b: all column blocks, c: columns of b
//
// The dense product, from the compact values: rows of windows are the M operand, and each lane that loads a part of it
// (ldmatrix takes the address of every row) reads the values of its row where the mask keeps it, a line of zeros where
// not. Tokens of gᵀ are the N operand (MN-major); g [batch, out_features, tokens] and dx [batch, in_features, tokens]
// are contiguous along tokens.
//
// Absent weights times NaN or infinity would be NaN. All other results are right, so elements that are NaN at the end
// are summed again from the kept weights alone.
//
// Stage. 64 columns of one column block: q lines of values per window, 64 lines of gᵀ for every 64 tokens.
// Ownership. A block (one per multiprocessor, persistent) owns four windows (up to 128 rows) x 256 tokens at a time,
// each
//   of its two consumer warpgroups two windows. Producer warp 0 copies.
// Shared memory (bytes): ring of slots x (32768 + 512 q rounded up to 1024), g first; 8 x 1280 for results on their way
//   out; 128 zeros; 2 x 8 x 8 barriers.
// Synchronisation. full[slot]: bytes have landed. empty[slot]: the eight consumer warps are done with it.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_T_EXPAND_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_T_EXPAND_CUH_

#include "cuda/feature_rows.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda::block_t_expand {

inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
inline constexpr int kMaxSlots = 8;
inline constexpr int kWindows = 4;  // of a tile
inline constexpr int kTokens = 256;
inline constexpr int kTokenChunks = kTokens / kChunk;
inline constexpr int kChunkBytes = kChunk * kLineBytes;
inline constexpr int kFixedBytes = kConsumers * 4 * kFeatureRowBytes + kLineBytes + 2 * kMaxSlots * 8;
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

struct Arguments {
  CUtensorMap values, g;
  Geometry geometry;
  const void* values_data;
  const void* g_data;
  const uint32_t* mask;
  Result result;
  int32_t chunks;  // stages of a column block
  int32_t stage_bytes;
  int32_t slots;
  int32_t token_tiles;
  int32_t window_tiles;
  int32_t tiles;
};

struct Tile {
  int32_t batch, token, window;  // first token and window
};

__device__ __forceinline__ Tile TileAt(const Arguments& a, int32_t index) {
  const int32_t in_batch = index % (a.token_tiles * a.window_tiles);
  return {index / (a.token_tiles * a.window_tiles), in_batch / a.window_tiles * kTokens,
          in_batch % a.window_tiles * kWindows};
}

struct SharedMap {
  uint32_t base;
  int slots, stage_bytes;

  __device__ uint32_t Tokens(int slot) const { return base + slot * stage_bytes; }
  __device__ uint32_t Values(int slot) const { return Tokens(slot) + kTokenChunks * kChunkBytes; }
  __device__ uint32_t Store(int warp) const { return Tokens(slots) + warp * kFeatureRowBytes; }
  __device__ uint32_t Zeros() const { return Store(kConsumers * 4); }
  __device__ uint32_t Full(int slot) const { return Zeros() + kLineBytes + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(kMaxSlots + slot); }
};

// One thread: copies.
__device__ __forceinline__ void Copy(const Arguments& a, const SharedMap& shared) {
  const Geometry& g = a.geometry;
  RingPosition at;
  for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
    const Tile tile = TileAt(a, index);
    for (int block = 0; block < g.out_blocks; ++block) {
      for (int chunk = 0; chunk < a.chunks; ++chunk, at.Advance(a.slots)) {
        const uint32_t full = shared.Full(at.slot);
        BarrierWait(shared.Empty(at.slot), at.parity ^ 1);
        BarrierArriveExpect(full, kTokenChunks * kChunkBytes + kWindows * g.q * kLineBytes);
        LoadBox(shared.Values(at.slot), &a.values, full, chunk * kChunk, 0, block, tile.window, tile.batch);
#pragma unroll
        for (int i = 0; i < kTokenChunks; ++i) {
          LoadBox(shared.Tokens(at.slot) + i * kChunkBytes, &a.g, full, tile.token + i * kChunk,
                  block * g.bn + chunk * kChunk, tile.batch);
        }
      }
    }
  }
}

template <class T>
class Consumer {
 public:
  __device__ Consumer(const Arguments& a, const SharedMap& shared, int consumer)
      : a_(a),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        window_(consumer * 2 + threadIdx.x / (2 * kWarpSize) % 2),
        first_unit_(threadIdx.x / kWarpSize % 2 * 16),
        store_(shared.Store(threadIdx.x / kWarpSize)) {}

  __device__ void Run(const Tile& tile) {
    const Geometry& g = a_.geometry;
    float d[kTokens / 2];
    Reduce(tile, d);
    bool poisoned = false;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) poisoned |= d[i] != d[i];
    const auto row_of = [&](int row) { return RowOf(tile, first_unit_ + row); };
    StoreFeatureRows<kTokens>(a_.result, tile.batch * g.in_features, g.tokens, tile.token, store_, d, row_of);
    if (__any_sync(~0u, poisoned)) SumAgain(tile);
  }

 private:
  // The row of a unit of this warp's window, or -1.
  __device__ int64_t RowOf(const Tile& tile, int unit) const {
    const Geometry& g = a_.geometry;
    const int64_t window = tile.window + window_, row = window * g.window_units + unit;
    return unit < g.window_units && window < g.windows && row < g.in_features ? row : -1;
  }

  __device__ const uint32_t* Masks(const Tile& tile) const {
    const Geometry& g = a_.geometry;
    // Of windows beyond the last there are no results: any mask will do.
    return a_.mask + (tile.batch * g.windows + min(int64_t{tile.window} + window_, g.windows - 1)) * g.out_blocks;
  }

  __device__ void Release(int slot) {
    if (lane_ == 0) BarrierArrive(shared_.Empty(slot));
  }

  // Line of the values of this tile's stage that this lane's row has, or -1.
  __device__ int LineOf(uint32_t bits, int unit) const {
    const Geometry& g = a_.geometry;
    const int rank = __popc(bits & ((1u << unit) - 1));
    return (bits >> unit & 1) && rank < g.q && unit < g.window_units ? window_ * g.q + rank : -1;
  }

  __device__ void Reduce(const Tile& tile, float (&d)[kTokens / 2]) {
    const int blocks = static_cast<int>(a_.geometry.out_blocks);
    const uint32_t* const masks = Masks(tile);
    uint32_t bits = __ldg(masks);
    uint32_t even[4][4], odd[4][4];
    int pending = -1, step = 0, line = -1;
    const int steps = blocks * a_.chunks;
    const auto next = [&](uint32_t (&fragments)[4][4]) {
      if (step % a_.chunks == 0) {
        const int block = step / a_.chunks;
        line = LineOf(bits, first_unit_ + lane_ % 16);
        if (block + 1 < blocks) bits = __ldg(masks + block + 1);
      }
      Stage(line, step, fragments, d, pending);
      ++step;
    };
    while (step + 1 < steps) {
      next(even);
      next(odd);
    }
    if (step < steps) next(even);
    MmaWait<0>();
    Release(pending);
  }

  // The products of one stage; those of the stage before are done when it returns. Lane l reads row l % 16 of its
  // warp's, the half l / 16 of 16 k.
  __device__ __forceinline__ void Stage(int line, int step, uint32_t (&fragments)[4][4], float (&d)[kTokens / 2],
                                        int& pending) {
    BarrierWait(shared_.Full(at_.slot), at_.parity);
    const uint32_t row = line < 0 ? shared_.Zeros() : shared_.Values(at_.slot) + line * kLineBytes;
    const uint32_t piece = (lane_ / 16 ^ (line & 7)) * 16;
#pragma unroll
    for (int depth = 0; depth < 4; ++depth) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(fragments[depth][0]), "=r"(fragments[depth][1]), "=r"(fragments[depth][2]),
                     "=r"(fragments[depth][3])
                   : "r"(row + (piece ^ depth * 32))
                   : "memory");
    }
    const uint64_t tokens = MmaDescriptor(shared_.Tokens(at_.slot), kChunkBytes);
    MmaFence();
#pragma unroll
    for (int depth = 0; depth < 4; ++depth) {
      MmaRegisters<T, kTokens, Major::kMN>(d, fragments[depth], tokens + depth * kDepthAdvance<Major::kMN>,
                                           step + depth);
    }
    MmaCommit();
    MmaWait<1>();
    if (pending >= 0) Release(pending);
    pending = at_.slot;
    at_.Advance(a_.slots);
  }

  // Results of this warp that are NaN, from the kept weights alone.
  __device__ __noinline__ void SumAgain(const Tile& tile) const {
    const Geometry& g = a_.geometry;
    const uint32_t* const masks = Masks(tile);
    const T* const values = static_cast<const T*>(a_.values_data);
    __syncwarp();
    for (int unit = first_unit_; unit < first_unit_ + 16; ++unit) {
      const int64_t row = RowOf(tile, unit);
      if (row < 0) break;
      const int64_t list = (tile.batch * g.windows + tile.window + window_) * g.out_blocks;
      for (int64_t token = tile.token + lane_; token < min(g.tokens, int64_t{tile.token} + kTokens);
           token += kWarpSize) {
        const int64_t place = (tile.batch * g.in_features + row) * g.tokens + token;
        if (!IsNaN(place)) continue;
        const T* const y = static_cast<const T*>(a_.g_data) + tile.batch * g.out_features * g.tokens + token;
        float sum = 0.0f;
        for (int64_t block = 0; block < g.out_blocks; ++block) {
          const int line = LineOf(__ldg(masks + block), unit);
          if (line < 0) continue;
          const T* const w = values + ((list + block) * g.q + line - window_ * g.q) * g.bn;
          const int64_t columns = min(int64_t{g.bn}, g.out_features - block * g.bn);
          for (int64_t c = 0; c < columns; ++c) {
            sum = fmaf(ToFloat(w[c]), ToFloat(y[(block * g.bn + c) * g.tokens]), sum);
          }
        }
        StoreResult(a_.result, place, sum);
      }
    }
  }
  __device__ bool IsNaN(int64_t place) const {
    bool nan = false;
    WithOutputType(a_.result.dtype, [&](auto zero) {
      const float v = ToFloat(static_cast<const decltype(zero)*>(a_.result.data)[place]);
      nan = v != v;
    });
    return nan;
  }

  const Arguments& a_;
  const SharedMap shared_;
  const int lane_;
  const int window_, first_unit_;  // of the tile's windows, and first of its units: this warp's rows
  const uint32_t store_;
  RingPosition at_;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) ManyTokensExpanded(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap shared{SharedAddress(storage), a.slots, a.stage_bytes};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), 1);
      BarrierInit(shared.Empty(slot), kConsumers * 4);
    }
    BarrierInitFence();
  }
  if (threadIdx.x < kLineBytes / 4) {
    *reinterpret_cast<uint32_t*>(storage + (shared.Zeros() - shared.base) + threadIdx.x * 4) = 0;
  }
  __syncthreads();

  if (warpgroup >= kConsumers) {
    ReleaseRegisters<kProducerRegisters>();
    if (threadIdx.x / kWarpSize % 4 == 0 && ElectOne()) Copy(a, shared);
  } else {
    ClaimRegisters<kConsumerRegisters>();
    Consumer<T> consumer(a, shared, warpgroup);
    for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) consumer.Run(TileAt(a, index));
  }
}

}  // namespace nmsparse::cuda::block_t_expand

#endif  // JAX_NMSPARSE_CUDA_BLOCK_T_EXPAND_CUH_
