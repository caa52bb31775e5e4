// Many tokens times transposed block-wise (b, b) weights on Hopper's tensor cores, feature-major:
//
//   dxᵀ[i, t] = sum_b sum_c values[i, b, c] gᵀ[b, c, t]        b: the column blocks that keep the unit of row i
//
// All rows of a unit are kept by the same column blocks, so a tile of one unit has one reduction: the blocks whose mask
// has the unit's bit, as many as there are. 64 rows of values are the M operand (K-major), tokens of gᵀ the N operand
// (MN-major); g [batch, out_features, tokens] and dx [batch, in_features, tokens] are contiguous along tokens.
//
// Stage. 64 columns of one column block: a line per row of values, 64 lines of gᵀ for every 64 tokens.
// Ownership. A block (one per multiprocessor, persistent) owns kRows rows of a unit x kTokens tokens at a time, each of
//   its two consumer warpgroups 64 rows x 256 tokens. Producer warp 0 reads the masks and copies.
// Shared memory (bytes): ring of slots x (128 kRows + 8192 kTokens / 64), values first; 8 x 1280 for results on their
//   way out; 8 x 4 flags; 2 x 8 x 8 barriers.
// Synchronisation. full[slot]: bytes have landed; the slot's flag says whether it is the last of its tile. empty[slot]:
//   the eight consumer warps are done with it.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_T_UNITS_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_T_UNITS_CUH_

#include "cuda/feature_rows.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda::block_t_units {

inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
inline constexpr int kMaxSlots = 8;
inline constexpr int kMmaTokens = 256;
inline constexpr int kAccumulators = kMmaTokens / 2;  // of a thread
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// What a stage's flag says.
inline constexpr uint32_t kMore = 0, kLast = 1, kNone = 2;  // kNone: no block keeps the unit, nothing was copied

template <class T_, int kRows_>
struct Config {
  using T = T_;
  static constexpr int kRows = kRows_;
  static constexpr int kTokens = kRows == 128 ? kMmaTokens : 2 * kMmaTokens;  // the consumers split the rows first
  static constexpr int kTokenChunks = kTokens / kChunk;
  static constexpr int kChunkBytes = kChunk * kLineBytes;
  static constexpr int kStageBytes = kRows * kLineBytes + kTokenChunks * kChunkBytes;
  static constexpr int kFixedBytes = kConsumers * 4 * kFeatureRowBytes + kMaxSlots * 4 + 2 * kMaxSlots * 8;
  static_assert(kRows == 64 || kRows == 128, "a consumer owns 64 rows");
};

struct Arguments {
  CUtensorMap values, g;
  Geometry geometry;
  const uint32_t* mask;
  Result result;
  int32_t chunks;  // stages of a column block
  int32_t slots;
  int32_t token_tiles;
  int32_t row_tiles;
  int32_t tiles;
};

struct Tile {
  int32_t batch, token, row;  // first token and row
  int32_t window, unit;       // of the row
};

template <class C>
__device__ __forceinline__ Tile TileAt(const Arguments& a, int32_t index) {
  const Geometry& g = a.geometry;
  const int32_t in_batch = index % (a.token_tiles * a.row_tiles);
  const int32_t row = in_batch % a.row_tiles * C::kRows;
  return {index / (a.token_tiles * a.row_tiles), in_batch / a.row_tiles * C::kTokens, row, row / g.bk / g.window_units,
          row / g.bk % g.window_units};
}

template <class C>
struct SharedMap {
  uint32_t base;
  int slots;

  __device__ uint32_t Values(int slot) const { return base + slot * C::kStageBytes; }
  __device__ uint32_t Tokens(int slot) const { return Values(slot) + C::kRows * kLineBytes; }
  __device__ uint32_t Store(int warp) const { return base + slots * C::kStageBytes + warp * kFeatureRowBytes; }
  __device__ uint32_t Flag(int slot) const { return Store(kConsumers * 4) + slot * 4; }
  __device__ uint32_t Full(int slot) const { return Flag(kMaxSlots) + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(kMaxSlots + slot); }
};

// ------------------------------------------------------------------------------------------------------- producer

// One warp: finds the column blocks that keep the unit, 32 at a time, and copies their stages.
template <class C>
class Producer {
 public:
  __device__ Producer(const Arguments& a, const SharedMap<C>& shared) : a_(a), shared_(shared) {}

  __device__ void Run(const Tile& tile) {
    const Geometry& g = a_.geometry;
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t* const masks = a_.mask + (tile.batch * g.windows + tile.window) * g.out_blocks;
    // The block and rank whose stages come next: it is known one ahead which stage is the last.
    int block = -1, rank = 0;
    for (int64_t first = 0; first < g.out_blocks; first += kWarpSize) {
      const uint32_t bits = first + lane < g.out_blocks ? __ldg(masks + first + lane) : 0;
      const int rank_here = __popc(bits & ((1u << tile.unit) - 1));
      uint32_t kept = __ballot_sync(~0u, (bits >> tile.unit & 1) && rank_here < g.q);
      for (; kept != 0; kept &= kept - 1) {
        const int found = __ffs(static_cast<int>(kept)) - 1;
        if (block >= 0) CopyBlock(tile, block, rank, kMore);
        block = static_cast<int>(first) + found;
        rank = __shfl_sync(~0u, rank_here, found);
      }
    }
    if (block >= 0) {
      CopyBlock(tile, block, rank, kLast);
    } else {
      BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
      if (ElectOne()) {
        SetFlag(kNone);
        BarrierArrive(shared_.Full(at_.slot));
      }
      __syncwarp();
      at_.Advance(a_.slots);
    }
  }

 private:
  __device__ void SetFlag(uint32_t flag) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_.Flag(at_.slot)), "r"(flag) : "memory");
  }

  __device__ void CopyBlock(const Tile& tile, int block, int rank, uint32_t flag) {
    const Geometry& g = a_.geometry;
    for (int chunk = 0; chunk < a_.chunks; ++chunk, at_.Advance(a_.slots)) {
      const uint32_t full = shared_.Full(at_.slot);
      BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
      if (ElectOne()) {
        SetFlag(chunk == a_.chunks - 1 ? flag : kMore);
        BarrierArriveExpect(full, C::kStageBytes);
        LoadBox(shared_.Values(at_.slot), &a_.values, full, chunk * kChunk, rank * g.bk + tile.row % g.bk, block,
                tile.window, tile.batch);
#pragma unroll
        for (int i = 0; i < C::kTokenChunks; ++i) {
          LoadBox(shared_.Tokens(at_.slot) + i * C::kChunkBytes, &a_.g, full, tile.token + i * kChunk,
                  block * g.bn + chunk * kChunk, tile.batch);
        }
      }
      __syncwarp();
    }
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  RingPosition at_;
};

// ------------------------------------------------------------------------------------------------------- consumers

template <class C>
class Consumer {
 public:
  using T = typename C::T;

  __device__ Consumer(const Arguments& a, const SharedMap<C>& shared, int consumer)
      : a_(a),
        shared_(shared),
        rows_(C::kRows == 128 ? consumer * kMmaRows : 0),
        tokens_(C::kRows == 128 ? 0 : consumer * kMmaTokens),
        warp_(threadIdx.x / kWarpSize % 4),
        store_(shared.Store(threadIdx.x / kWarpSize)) {}

  __device__ void Run(const Tile& tile) {
    float d[kAccumulators];
    if (!Reduce(d)) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) d[i] = 0.0f;
    }
    const Geometry& g = a_.geometry;
    const int64_t first = tile.row + rows_ + warp_ * 16;
    StoreFeatureRows<kMmaTokens>(a_.result, tile.batch * g.in_features, g.tokens, tile.token + tokens_, store_, d,
                                 [&](int row) { return first + row < g.in_features ? first + row : -1; });
  }

 private:
  __device__ void Release(int slot) { BarrierArrive(shared_.Empty(slot)); }

  __device__ uint32_t AwaitStage() const {
    BarrierWait(shared_.Full(at_.slot), at_.parity);
    uint32_t flag;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(flag) : "r"(shared_.Flag(at_.slot)) : "memory");
    return flag;
  }

  // Whether any block keeps the unit: otherwise d is left as it is.
  __device__ bool Reduce(float (&d)[kAccumulators]) {
    uint32_t flag = AwaitStage();
    if (flag == kNone) {
      Release(at_.slot);
      at_.Advance(a_.slots);
      return false;
    }
    for (int pending = -1, step = 0;; ++step) {
      const uint64_t values = MmaDescriptor(shared_.Values(at_.slot) + rows_ * kLineBytes, kLineBytes);
      const uint64_t tokens =
          MmaDescriptor(shared_.Tokens(at_.slot) + tokens_ / kChunk * C::kChunkBytes, C::kChunkBytes);
      MmaFence();
#pragma unroll
      for (int depth = 0; depth < kChunk / kMmaDepth; ++depth) {
        Mma<T, kMmaTokens, Major::kK, Major::kMN>(d, values + depth * kDepthAdvance<Major::kK>,
                                                  tokens + depth * kDepthAdvance<Major::kMN>, step + depth);
      }
      MmaCommit();
      MmaWait<1>();
      if (pending >= 0) Release(pending);
      pending = at_.slot;
      at_.Advance(a_.slots);
      if (flag == kLast) {
        MmaWait<0>();
        Release(pending);
        return true;
      }
      flag = AwaitStage();
    }
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  const int rows_, tokens_;  // of this consumer in the tile
  const int warp_;
  const uint32_t store_;
  RingPosition at_;
};

// ---------------------------------------------------------------------------------------------------------- kernel

template <class C>
__global__ void __launch_bounds__(kThreads, 1) ManyTokensUnits(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap<C> shared{SharedAddress(storage), a.slots};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), 1);
      BarrierInit(shared.Empty(slot), kConsumers * kWarpgroupSize);
    }
    BarrierInitFence();
  }
  __syncthreads();

  if (warpgroup >= kConsumers) {
    ReleaseRegisters<kProducerRegisters>();
    if (threadIdx.x / kWarpSize % 4 == 0) {
      Producer<C> producer(a, shared);
      for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) producer.Run(TileAt<C>(a, index));
    }
  } else {
    ClaimRegisters<kConsumerRegisters>();
    Consumer<C> consumer(a, shared, warpgroup);
    for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) consumer.Run(TileAt<C>(a, index));
  }
}

}  // namespace nmsparse::cuda::block_t_units

#endif  // JAX_NMSPARSE_CUDA_BLOCK_T_UNITS_CUH_
