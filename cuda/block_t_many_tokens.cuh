// Many tokens times transposed vector-wise (1, L) weights on Hopper's tensor cores, feature-major:
//
//   dx[i, t] = sum_b sum_c values[i, b, c] gᵀ[b, c, t]        b: the column blocks that keep row i, c: columns of b
//
// Rows of a window are kept by different column blocks, so no two of them share a reduction. Each column block is
// therefore multiplied compactly: its kept rows are the N operand of products whose M operand is g, and the products
// are added to float32 sums of all rows of the windows, in shared memory, at the rows that the mask names.
//
// Lines. A product takes the kept rows of eight windows of one column block: line 8 r + w is the r-th kept row of
//   window w, which is how one box of the copy engine brings them. So, by the layout of wgmma's accumulators, lane l of
//   a warp gets rows of the windows 2 (l % 4) and 2 (l % 4) + 1 and of no other, for the tokens l / 4 and l / 4 + 8 of
//   its warp's 16: sums belong to one lane each. They need no synchronisation, and lane l keeps its own in bank pair l.
// Layouts. values [batch, windows, out_blocks, q, 1, bn]; g [batch, out_features, tokens] and dx [batch, in_features,
//   tokens] are contiguous along tokens. g is MN-major, values are K-major: nothing is transposed.
// Stage. 64 columns of one column block: 64 lines of g per 64 tokens, kLines lines of values. The last stage of a
//   column block also holds the list of its kept rows, a byte each.
// Ownership. A block (one per multiprocessor, persistent) owns 128 tokens and eight windows at a time, each of its two
//   consumer warpgroups 64 tokens. Producer warp 0 copies, the others list.
// Shared memory (bytes): 131072 sums, [warp][window parity][unit][lane][2] float32; ring of slots x (16384 + 128
//   kLines), g first; 8 x kLines lists; 2 x 8 x 8 barriers.
// Synchronisation. full[slot]: bytes have landed, and every list warp has seen the slot empty, the one of its column
//   block after writing the list. empty[slot]: the eight consumer warps are done.
//   A column block's sums are updated while the products of the next run, in the other half of the accumulators.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_T_MANY_TOKENS_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_T_MANY_TOKENS_CUH_

#include "cuda/feature_rows.cuh"
#include "cuda/kept_units.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda::block_t {

inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
inline constexpr int kMaxSlots = 8;
inline constexpr int kWindows = 8;                       // of a product and of a tile
inline constexpr int kTokens = kConsumers * kChunk;      // of a tile
inline constexpr int kTokenBytes = kChunk * kLineBytes;  // of a stage, per 64 tokens
inline constexpr int kListWarps = 3;
inline constexpr int kWarpTokens = 16;
inline constexpr int kUnitBytes = kWarpSize * 8;             // sums of four windows' unit, 16 tokens
inline constexpr int kParityBytes = kMaskBits * kUnitBytes;  // of the even or odd windows
inline constexpr int kWarpSumsBytes = 2 * kParityBytes;      // of a warp
inline constexpr int kSumsBytes = kConsumers * 4 * kWarpSumsBytes;
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <class T_, int kLines_>
struct Config {
  using T = T_;
  static constexpr int kLines = kLines_;  // of a product, its N axis
  static constexpr int kRanks = kLines / kWindows;
  static constexpr int kStageBytes = kConsumers * kTokenBytes + kLines * kLineBytes;
  static constexpr int kFixedBytes = kSumsBytes + kMaxSlots * kLines + 2 * kMaxSlots * 8;
  static_assert(kRanks % 4 == 0, "a lane reads its lists by words");
};

struct Arguments {
  CUtensorMap values, g;
  Geometry geometry;
  const uint32_t* mask;
  Result result;
  int32_t chunks;  // stages of a column block
  int32_t slots;
  int32_t token_tiles;
  int32_t window_tiles;
  int32_t tiles;
};

using Tile = WindowTile;

__device__ __forceinline__ Tile TileAt(const Arguments& a, int32_t index) {
  return WindowTileAt<kTokens, kWindows>(index, a.token_tiles, a.window_tiles);
}

template <class C>
struct SharedMap {
  uint32_t base;
  int slots;

  __device__ uint32_t Sums(int warp) const { return base + warp * kWarpSumsBytes; }
  __device__ uint32_t Tokens(int slot, int consumer) const {
    return base + kSumsBytes + slot * C::kStageBytes + consumer * kTokenBytes;
  }
  __device__ uint32_t Values(int slot) const { return Tokens(slot, kConsumers); }
  __device__ uint32_t List(int slot) const { return base + kSumsBytes + slots * C::kStageBytes + slot * C::kLines; }
  __device__ uint32_t Full(int slot) const { return List(kMaxSlots) + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(kMaxSlots + slot); }
};

// ------------------------------------------------------------------------------------------------------- producers

// One thread: copies.
template <class C>
__device__ void Copy(const Arguments& a, const SharedMap<C>& shared) {
  const Geometry& g = a.geometry;
  RingPosition at;
  for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
    const Tile tile = TileAt(a, index);
    for (int block = 0; block < g.out_blocks; ++block) {
      for (int chunk = 0; chunk < a.chunks; ++chunk, at.Advance(a.slots)) {
        const uint32_t full = shared.Full(at.slot);
        BarrierWait(shared.Empty(at.slot), at.parity ^ 1);
        BarrierArriveExpect(full, kConsumers * kTokenBytes + kWindows * g.q * kLineBytes);
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) {
          LoadBox(shared.Tokens(at.slot, i), &a.g, full, tile.token + i * kChunk, block * g.bn + chunk * kChunk,
                  tile.batch);
        }
        LoadBox(shared.Values(at.slot), &a.values, full, chunk * kChunk, tile.window, 0, block, tile.batch);
      }
    }
  }
}

// One of kListWarps warps: lists the kept units of the tile's windows for every kListWarps-th column block, four ranks
// a lane and word. One warp alone would not keep up with the consumers.
template <class C>
__device__ void List(const Arguments& a, const SharedMap<C>& shared, int warp) {
  const Geometry& g = a.geometry;
  const int lane = threadIdx.x % kWarpSize, window = lane / 4, word = lane % 4;
  const int blocks = static_cast<int>(g.out_blocks);
  RingPosition at;
  for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
    const Tile tile = TileAt(a, index);
    // Windows beyond the last have zeros for values; what their list says is as good as anything.
    const int64_t inside = min(g.windows - 1, int64_t{tile.window} + window);
    const uint32_t* const masks = a.mask + (tile.batch * g.windows + inside) * g.out_blocks;
    uint32_t bits = warp < blocks ? __ldg(masks + warp) : 0;  // of the next block of this warp
    int seen = 0;
    for (int block = warp; seen < blocks; block += kListWarps) {
      // Listed before the stages of the other warps' blocks are waited for.
      const uint32_t next = block + kListWarps < blocks ? __ldg(masks + block + kListWarps) : 0;
      uint32_t units = 0;
#pragma unroll
      for (int r = 0; r < 4; ++r) units |= UnitOfRank(bits, word * 4 + r, g.window_units) << r * 8;
      bits = next;
      for (; seen <= block && seen < blocks; ++seen) {
        for (int chunk = 0; chunk < a.chunks; ++chunk, at.Advance(a.slots)) {
          // In stages of other warps' blocks, too: a parity names a phase only to those whom the ring awaits.
          BarrierWait(shared.Empty(at.slot), at.parity ^ 1);
          if (seen == block && chunk == a.chunks - 1 && word < C::kRanks / 4) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared.List(at.slot) + window * C::kRanks + word * 4),
                         "r"(units)
                         : "memory");
          }
          BarrierArrive(shared.Full(at.slot));
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------- consumers

template <class C>
class Consumer {
 public:
  using T = typename C::T;

  __device__ Consumer(const Arguments& a, const SharedMap<C>& shared, int consumer)
      : a_(a),
        shared_(shared),
        consumer_(consumer),
        warp_(threadIdx.x / kWarpSize % 4),
        lane_(threadIdx.x % kWarpSize),
        sums_(shared.Sums(consumer * 4 + warp_)) {
    for (int unit = 0; unit < 2 * kMaskBits; ++unit) StoreSum(sums_ + unit * kUnitBytes + lane_ * 8, float2{});
  }

  __device__ void Run(const Tile& tile) {
    const int blocks = static_cast<int>(a_.geometry.out_blocks);
    Products even, odd;
    for (int block = 0; block < blocks; block += 2) {
      Multiply(even, odd, block > 0);
      if (block + 1 < blocks) Multiply(odd, even, true);
    }
    if (blocks % 2 == 1) {
      Add(even, 0, C::kRanks);
    } else {
      Add(odd, 0, C::kRanks);
    }
    Store(tile);
  }

 private:
  // The products of one column block, and which unit each of this lane's lines is.
  struct Products {
    float d[C::kLines / 2];
    uint32_t units[2][C::kRanks / 4];  // of window 2 (l % 4) and the next: a byte per rank
  };

  __device__ void Release() {
    BarrierArrive(shared_.Empty(done_.slot));
    done_.Advance(a_.slots);
  }

  // Multiplies the next column block, and adds up the one before meanwhile.
  __device__ void Multiply(Products& next, const Products& previous, bool add) {
    constexpr int kHalf = C::kRanks >= 8 ? C::kRanks / 2 : C::kRanks;
    for (int chunk = 0; chunk < a_.chunks; ++chunk) {
      BarrierWait(shared_.Full(at_.slot), at_.parity);
      const uint64_t tokens = MmaDescriptor(shared_.Tokens(at_.slot, consumer_), kLineBytes);
      const uint64_t values = MmaDescriptor(shared_.Values(at_.slot), kLineBytes);
      MmaFence();
#pragma unroll
      for (int depth = 0; depth < kChunk / kMmaDepth; ++depth) {
        Mma<T, C::kLines, Major::kMN, Major::kK>(next.d, tokens + depth * kDepthAdvance<Major::kMN>,
                                                 values + depth * kDepthAdvance<Major::kK>, chunk + depth);
      }
      MmaCommit();
      if (chunk == a_.chunks - 1) LoadUnits(next);
      at_.Advance(a_.slots);
      if (chunk > 0) {
        MmaWait<1>();
        Release();
      }
      if (add && chunk < 2) Add(previous, chunk * kHalf, a_.chunks == 1 ? C::kRanks : (chunk + 1) * kHalf);
    }
    MmaWait<0>();
    Release();
  }

  __device__ void LoadUnits(Products& p) const {
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const uint32_t from = shared_.List(at_.slot) + (lane_ % 4 * 2 + parity) * C::kRanks;
#pragma unroll
      for (int word = 0; word < C::kRanks / 4; ++word) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(p.units[parity][word]) : "r"(from + word * 4) : "memory");
      }
    }
  }

  __device__ static float2 LoadSum(uint32_t address) {
    float2 sum;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(sum.x), "=f"(sum.y) : "r"(address) : "memory");
    return sum;
  }
  __device__ static void StoreSum(uint32_t address, float2 sum) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(sum.x), "f"(sum.y) : "memory");
  }

  // Adds the products of ranks begin ... end - 1 to their sums, four ranks of both windows at a time: d[4 r + p] and
  // d[4 r + 2 + p] are rank r of the window of parity p, tokens l / 4 and l / 4 + 8.
  __device__ void Add(const Products& p, int begin, int end) {
    const int q = a_.geometry.q;
#pragma unroll
    for (int first = 0; first < C::kRanks; first += 4) {
      if (first < begin || first >= end || first >= q) continue;
      uint32_t at[8];
      float2 sum[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Bytes: 8 l, the unit, 0, 0: the unit's sums are 256 bytes.
        const uint32_t place = __byte_perm(p.units[i % 2][first / 4], lane_ * 8, 0x5504 | (i / 2) << 4);
        at[i] = sums_ + i % 2 * kParityBytes + place;
        sum[i] = LoadSum(at[i]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int rank = first + i / 2;
        sum[i].x += p.d[rank * 4 + i % 2];
        sum[i].y += p.d[rank * 4 + i % 2 + 2];
        if (rank < q) StoreSum(at[i], sum[i]);
      }
    }
  }

  // Writes the sums and clears them. Lanes of neighbouring tokens exchange, so that each writes two tokens of a row:
  // even ones of the warp's first eight tokens, odd ones of the others.
  __device__ void Store(const Tile& tile) {
    const Geometry& g = a_.geometry;
    const bool odd = lane_ / 4 % 2 == 1;
    const int token = tile.token + consumer_ * kChunk + warp_ * kWarpTokens + lane_ / 8 * 2 + odd * 8;
#pragma unroll 1
    for (int parity = 0; parity < 2; ++parity) {
      const int64_t window = tile.window + lane_ % 4 * 2 + parity;
#pragma unroll 4
      for (int unit = 0; unit < kMaskBits; ++unit) {
        const uint32_t at = sums_ + parity * kParityBytes + unit * kUnitBytes + lane_ * 8;
        const float2 own = LoadSum(at);
        StoreSum(at, float2{});
        const float other = __shfl_xor_sync(~0u, odd ? own.x : own.y, 4);
        const float2 pair = odd ? make_float2(other, own.y) : make_float2(own.x, other);
        const int64_t row = window * g.window_units + unit;
        if (unit < g.window_units && window < g.windows && row < g.in_features && token < g.tokens) {
          StorePair((tile.batch * g.in_features + row) * g.tokens + token, pair);
        }
      }
    }
  }
  __device__ void StorePair(int64_t place, float2 pair) const {
    if (a_.result.dtype == DType::kF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(a_.result.data) + place) = pair;
    } else if (a_.result.dtype == DType::kF16) {
      *reinterpret_cast<__half2*>(static_cast<__half*>(a_.result.data) + place) = __float22half2_rn(pair);
    } else {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a_.result.data) + place) =
          __float22bfloat162_rn(pair);
    }
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  const int consumer_, warp_, lane_;
  const uint32_t sums_;
  RingPosition at_, done_;
};

// ---------------------------------------------------------------------------------------------------------- kernel

template <class C>
__global__ void __launch_bounds__(kThreads, 1) ManyTokensT(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap<C> shared{SharedAddress(storage), a.slots};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), 1 + kListWarps * kWarpSize);
      BarrierInit(shared.Empty(slot), kConsumers * kWarpgroupSize);
    }
    BarrierInitFence();
  }
  __syncthreads();

  if (warpgroup >= kConsumers) {
    ReleaseRegisters<kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize % 4;
    if (warp == 0 && ElectOne()) Copy(a, shared);
    if (warp > 0) List(a, shared, warp - 1);
  } else {
    ClaimRegisters<kConsumerRegisters>();
    Consumer<C> consumer(a, shared, warpgroup);
    for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) consumer.Run(TileAt(a, index));
  }
}

}  // namespace nmsparse::cuda::block_t

#endif  // JAX_NMSPARSE_CUDA_BLOCK_T_MANY_TOKENS_CUH_
