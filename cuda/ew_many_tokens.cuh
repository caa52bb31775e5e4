// Many tokens times element-wise weights (windows of 32) on Hopper's tensor cores, feature-major:
//
//   yᵀ[o, t] = act(scale[o] * sum over windows w, kept rows k of (w, o):  value * xᵀ[32 w + k, t] + bias[o])
//
// The weights are the M operand (64 columns of W a product), xᵀ the N operand as it lies in memory. How the weights
// become an operand is the Config's `Form`:
//
//   kSparse24   2 of every 4 rows are kept (q = 16). Sparse products: the 16 kept values of a column and window are one
//               row of the sparse operand, so a tile of `values` in shared memory is the operand; the metadata come
//               from the mask words, in registers. A mask that does not keep 2 of every 4 gives wrong numbers.
//   kExpanded   any q. Each warp expands its 16 columns to dense operands in registers, one window (32 rows) at a time,
//               while the products of the window before run. Of the four lanes of a column, lane t owns rows 8 t to
//               8 t + 7, one byte of the mask word: the order of a sum is free, and x arrives in the order that makes
//               those rows the lane's part of the operand (line 16 i + 8 h + 2 t + e of a window is row
//               8 t + 4 i + 2 h + e, by the strides of the tensor map). Zeros of the operand multiply x as in a dense
//               product: NaN or infinity in x may spread.
//
// Layouts. values [batch, windows, out_features, q], mask [batch, windows, out_features], x [batch, in_features,
// tokens]
//   and y [batch, out_features, tokens]; contiguous along the last axis.
// Ownership. A block (one per multiprocessor, persistent) owns a tile of 128 columns x kTokens tokens at a time; each
//   of two consumer warpgroups 64 columns of it, in registers. A stage is two windows. One thread of the third
//   warpgroup copies values and x. Mask words go from global memory to the registers that need them, two stages ahead.
// Shared memory (bytes): ring of slots, in each kWindows x 128 columns x 2 q of values (and up to 1 KiB of zeros, so
//   that reads past a column stay inside), then kTokens / 64 x 64 lines x 128 of x; results on their way out
//   (feature_major.cuh), 2 x kBuffers x 8192; barriers, 2 x 8 a slot.
// Synchronisation. full[slot]: its bytes have landed. empty[slot]: all eight consumer warps are done with it. Named
//   barriers 1 and 2: a consumer and its results.
#ifndef JAX_NMSPARSE_CUDA_EW_MANY_TOKENS_CUH_
#define JAX_NMSPARSE_CUDA_EW_MANY_TOKENS_CUH_

#include "cuda/ew_metadata.cuh"
#include "cuda/feature_major.cuh"
#include "cuda/wgmma_weights.cuh"

namespace nmsparse::cuda::ew {

enum class Form { kSparse24, kExpanded };

template <class T_, int kTokens_, Form kForm_>
struct ManyConfig {
  using T = T_;
  static constexpr int kTokens = kTokens_;
  static constexpr Form kForm = kForm_;
  static constexpr int kOut = 128;
  static constexpr int kCluster = 2;  // blocks that share x: each copies a part of it to all
  static constexpr int kClusterOut = kCluster * kOut;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kWindow = 32;
  static constexpr int kWindows = 2;  // of a stage
  static constexpr int kLines = kWindows * kWindow;
  static constexpr int kInputBytes = kTokens / kChunk * kLines * kLineBytes;  // of a stage
  static constexpr int kChunksPerBlock = kTokens / kChunk / kCluster;
  static constexpr int kMaxSlots = 8;
  using Output = TileOutput<kTokens, 2>;
  static constexpr int kFixedBytes = kConsumers * Output::kBytes + 2 * kMaxSlots * 8;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= 3 * 168,
                "the warpgroups share what the block was launched with, 168 registers a thread");

  __host__ __device__ static constexpr int ValueBytes(int q) { return kWindows * kOut * q * 2; }
  __host__ __device__ static constexpr int ValueRoom(int q) {
    return kForm == Form::kSparse24 ? ValueBytes(q) : (ValueBytes(q) + 16 + 1023) / 1024 * 1024;
  }
  __host__ __device__ static constexpr int StageBytes(int q) { return ValueRoom(q) + kInputBytes; }
};

struct ManyArguments {
  CUtensorMap values;  // kSparse24
  CUtensorMap x;
  const void* values_data;  // kExpanded
  const uint32_t* mask;
  OutputArguments output;
  TileOrder order;
  int32_t steps;  // stages of a tile
  int32_t slots;
};

// Tiles go to clusters, their halves to the blocks.
template <class C>
__device__ __forceinline__ Tile TileOfBlock(const ManyArguments& a, int32_t index) {
  Tile tile = a.order.At<C::kClusterOut, C::kTokens>(index);
  tile.out += static_cast<int32_t>(ClusterRank()) * C::kOut;
  return tile;
}
template <class C>
__device__ __forceinline__ int32_t FirstTile() {
  return blockIdx.x / C::kCluster;
}
template <class C>
__device__ __forceinline__ int32_t TileStride() {
  return gridDim.x / C::kCluster;
}

template <class C>
struct ManyShared {
  uint32_t base;
  int q, slots;

  __device__ uint32_t Values(int slot) const { return base + slot * C::StageBytes(q); }
  __device__ uint32_t Inputs(int slot) const { return Values(slot) + C::ValueRoom(q); }
  __device__ uint32_t Results(int consumer) const {
    return base + slots * C::StageBytes(q) + consumer * C::Output::kBytes;
  }
  __device__ uint32_t Full(int slot) const { return Results(C::kConsumers) + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(C::kMaxSlots + slot); }
};

// The mask words of a consumer's lane, stage after stage and tile after tile, kAhead stages ahead of their use.
template <class C>
class MaskStream {
 public:
  // kSparse24: columns g and g + 8 of the window whose metadata the lane supplies (the stage's first or second).
  // kExpanded: column g of both windows, then column g + 8 of both.
  static constexpr int kWords = C::kForm == Form::kSparse24 ? 2 : 4;
  static constexpr int kAhead = 2;

  __device__ MaskStream(const ManyArguments& a, int first_column) : a_(a), first_column_(first_column) {
    StartTile();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) Load(ahead_[i]);
  }

  __device__ void Take(uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = ahead_[0][i];
#pragma unroll
    for (int n = 0; n + 1 < kAhead; ++n) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) ahead_[n][i] = ahead_[n + 1][i];
    }
    Load(ahead_[kAhead - 1]);
  }

 private:
  __device__ void StartTile() {
    const Geometry& g = a_.output.geometry;
    step_ = 0;
    if (index_ >= a_.order.tiles) {
      columns_ = 0;
      return;
    }
    const Tile tile = TileOfBlock<C>(a_, index_);
    const int lane = threadIdx.x % kWarpSize;
    window_ = C::kForm == Form::kSparse24 ? lane % 4 / 2 : 0;
    const int column = tile.out + first_column_ + lane / 4;
    columns_ = static_cast<int>(g.out_features) - column;
    next_ = a_.mask + (tile.batch * g.windows + window_) * g.out_features + column;
  }

  __device__ void Load(uint32_t (&words)[kWords]) {
    const Geometry& g = a_.output.geometry;
    const int windows = static_cast<int>(g.windows);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int half = C::kForm == Form::kSparse24 ? i : i / 2, window = C::kForm == Form::kSparse24 ? 0 : i % 2;
      const bool inside = 8 * half < columns_ && window_ + window < windows;
      words[i] = inside ? __ldg(next_ + window * g.out_features + 8 * half) : 0;
    }
    next_ += C::kWindows * g.out_features;
    window_ += C::kWindows;
    if (++step_ == a_.steps) {
      index_ += TileStride<C>();
      StartTile();
    }
  }

  const ManyArguments& a_;
  const int first_column_;
  int index_ = FirstTile<C>(), step_ = 0, window_ = 0;
  int columns_ = 0;  // from this lane's first column to the last of the weight; not positive where there is none
  const uint32_t* next_ = nullptr;
  uint32_t ahead_[kAhead][kWords];
};

// A consumer warpgroup.
template <class C>
class ManyConsumer {
 public:
  using T = typename C::T;
  static constexpr int kTokens = C::kTokens;
  static constexpr uint32_t kChunkBytes = C::kLines * kLineBytes;

  __device__ ManyConsumer(const ManyArguments& a, const ManyShared<C>& shared, int consumer)
      : a_(a),
        shared_(shared),
        first_column_(consumer * kMmaRows),
        lane_(threadIdx.x % kWarpSize),
        masks_(a, first_column_ + threadIdx.x / kWarpSize % 4 * 16),
        output_(a.output, shared.Results(consumer), 1 + consumer) {
    const int t = lane_ % 4, row = first_column_ + threadIdx.x / kWarpSize % 4 * 16 + lane_ / 4;
    row_offset_ = row * shared.q * 2;
    below_ = (1u << 8 * t) - 1;
  }

  __device__ void Run(const Tile& tile) {
    float d[kTokens / 2];
    if constexpr (C::kForm == Form::kSparse24) {
      ReduceSparse(d);
    } else {
      ReduceExpanded(d);
    }
    output_.Send(d, tile.batch, tile.out + first_column_, tile.token);
  }
  __device__ void Finish() { output_.Finish(); }

 private:
  __device__ void Release(int slot) {
    if (lane_ < C::kCluster) BarrierArriveAt(shared_.Empty(slot), lane_);
  }

  // One stage. The tensor cores read the register of `metadata` until the products have ended, which the compiler does
  // not know: it is named once more, after the wait for the stage that follows, and two registers take turns.
  __device__ void MultiplySparse(float (&d)[kTokens / 2], int step, uint32_t& metadata, uint32_t& before) {
    const uint32_t halves = lane_ % 2 == 0 ? 0x5410u : 0x7632u;  // groups 0..3 or 4..7 of two mask words
    uint32_t words[2];
    masks_.Take(words);
    metadata = Metadata(__byte_perm(words[0], words[1], halves));
    BarrierWait(shared_.Full(at_.slot), at_.parity);
    const uint64_t weights = SparseDescriptor(shared_.Values(at_.slot) + first_column_ * kSparseRowBytes);
    const uint64_t inputs = MmaDescriptor(shared_.Inputs(at_.slot), kChunkBytes);
    MmaFence();
    MmaSparse<T, kTokens, 0>(d, weights, inputs, metadata, step);
    MmaSparse<T, kTokens, 1>(d, weights + C::kOut * kSparseRowBytes / 16, inputs + C::kWindow * kLineBytes / 16,
                             metadata, 1);
    MmaCommit();
    MmaWait<1>();
    KeepRegister(before);
    if (step > 0) Release(pending_);
    pending_ = at_.slot;
    at_.Advance(a_.slots);
  }

  __device__ void ReduceSparse(float (&d)[kTokens / 2]) {
    uint32_t even = 0, odd = 0;
    int step = 0;
    for (; step + 1 < a_.steps; step += 2) {
      MultiplySparse(d, step, even, odd);
      MultiplySparse(d, step + 1, odd, even);
    }
    if (step < a_.steps) MultiplySparse(d, step, even, odd);
    MmaWait<0>();
    KeepRegister(even);
    KeepRegister(odd);
    Release(pending_);
  }

  // Four rows of one column: the kept ones lie at the shared-memory address `from` on, `kept` are their mask bits.
  // Returns the pairs of rows as words, zero where not kept.
  __device__ static void ExpandNibble(uint32_t from, uint32_t kept, uint32_t* pair0, uint32_t* pair1) {
    const uint32_t word = from & ~3u;
    uint32_t w0, w1, w2;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w0) : "r"(word));
    asm volatile("ld.shared.u32 %0, [%1 + 4];" : "=r"(w1) : "r"(word));
    asm volatile("ld.shared.u32 %0, [%1 + 8];" : "=r"(w2) : "r"(word));
    const uint32_t align = 0x3210u + (from & 2) * 0x1111u;
    const uint32_t low = __byte_perm(w0, w1, align), high = __byte_perm(w1, w2, align);
    // One byte per row: is it kept; how many before it are, as the two selectors of that value's bytes.
    const uint32_t flags = kept * 0x00204081u & 0x01010101u;
    const uint32_t selectors = flags * 0x22222200u + 0x10101010u;
    const uint32_t ones = flags * 0xffu;
    *pair0 = __byte_perm(low, high, selectors) & __byte_perm(ones, 0, 0x1100);
    *pair1 = __byte_perm(low, high, selectors >> 16) & __byte_perm(ones, 0, 0x3322);
  }

  // a[i]: rows 4 i to 4 i + 3 of the eight that this lane owns in each of its two columns.
  __device__ void ExpandWindow(uint32_t values, const uint32_t (&words)[2], uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t before = min(__popc(words[half] & below_), shared_.q);
      const uint32_t byte = words[half] >> 8 * (lane_ % 4);
      uint32_t from = values + row_offset_ + half * 8 * shared_.q * 2 + before * 2;
      ExpandNibble(from, byte & 15, &a[0][half], &a[0][half + 2]);
      from += __popc(byte & 15) * 2;
      ExpandNibble(from, byte >> 4 & 15, &a[1][half], &a[1][half + 2]);
    }
  }

  __device__ void MultiplyWindow(float (&d)[kTokens / 2], const uint32_t (&a)[2][4], int window, int accumulate) {
    const uint64_t inputs = MmaDescriptor(shared_.Inputs(at_.slot) + window * C::kWindow * kLineBytes, kChunkBytes);
    MmaFence();
    MmaRegisters<T, kTokens>(d, a[0], inputs, accumulate);
    MmaRegisters<T, kTokens>(d, a[1], inputs + kMmaDepth * kLineBytes / 16, 1);
    MmaCommit();
  }

  __device__ void ReduceExpanded(float (&d)[kTokens / 2]) {
    const int values_per_window = C::kOut * shared_.q * 2;
    uint32_t first[2][4], second[2][4];
    for (int step = 0; step < a_.steps; ++step, at_.Advance(a_.slots)) {
      uint32_t words[4];
      masks_.Take(words);
      BarrierWait(shared_.Full(at_.slot), at_.parity);
      const uint32_t values = shared_.Values(at_.slot);
      MmaWait<1>();  // `first` is free
      ExpandWindow(values, {words[0], words[2]}, first);
      MultiplyWindow(d, first, 0, step);
      MmaWait<1>();  // so are `second` and the slot before
      if (step > 0) Release(pending_);
      pending_ = at_.slot;
      // A window beyond the last has no bits: zeros times zeros. (A branch here would serialise the products.)
      ExpandWindow(values + values_per_window, {words[1], words[3]}, second);
      MultiplyWindow(d, second, 1, 1);
    }
    MmaWait<0>();
    Release(pending_);
  }

  const ManyArguments& a_;
  const ManyShared<C> shared_;
  const int first_column_, lane_;
  uint32_t row_offset_, below_;
  RingPosition at_;
  int pending_ = 0;  // slot whose products may still run
  MaskStream<C> masks_;
  typename C::Output output_;
};

// The thread that copies.
template <class C>
__device__ void Produce(const ManyArguments& a, const ManyShared<C>& shared) {
  const Geometry& g = a.output.geometry;
  constexpr uint16_t kAll = (1 << C::kCluster) - 1;
  const int first_chunk = static_cast<int>(ClusterRank()) * C::kChunksPerBlock;
  RingPosition at;
  for (int index = FirstTile<C>(); index < a.order.tiles; index += TileStride<C>()) {
    const Tile tile = TileOfBlock<C>(a, index);
    const int columns = static_cast<int>(max(int64_t{0}, min(int64_t{C::kOut}, g.out_features - tile.out)));
    for (int step = 0; step < a.steps; ++step, at.Advance(a.slots)) {
      const int window = step * C::kWindows;
      BarrierWait(shared.Empty(at.slot), at.parity ^ 1);
      const uint32_t full = shared.Full(at.slot);
      if constexpr (C::kForm == Form::kSparse24) {
        BarrierArriveExpect(full, C::StageBytes(16));
        LoadBox(shared.Values(at.slot), &a.values, full, 0, tile.out, window, tile.batch);
      } else {
        const int windows = static_cast<int>(min(int64_t{C::kWindows}, g.windows - window));
        const uint32_t bytes = columns * g.q * 2;
        BarrierArriveExpect(full, windows * bytes + C::kInputBytes);
        const char* from = static_cast<const char*>(a.values_data) +
                           ((tile.batch * g.windows + window) * g.out_features + tile.out) * g.q * 2;
        for (int w = 0; w < windows && columns > 0; ++w) {
          LoadBytes(shared.Values(at.slot) + w * C::kOut * g.q * 2, from + w * g.out_features * g.q * 2, bytes, full);
        }
      }
#pragma unroll
      for (int i = 0; i < C::kChunksPerBlock; ++i) {
        const int chunk = first_chunk + i;
        const uint32_t to = shared.Inputs(at.slot) + chunk * C::kLines * kLineBytes;
        const int token = tile.token + chunk * kChunk;
        if constexpr (C::kForm == Form::kSparse24) {
          LoadBoxMulticast(to, &a.x, full, kAll, token, window * C::kWindow, tile.batch);
        } else {
          LoadBoxMulticast(to, &a.x, full, kAll, token, 0, 0, 0, static_cast<int>(tile.batch * g.windows) + window);
        }
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) ManyTokens(const __grid_constant__ ManyArguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const int q = a.output.geometry.q;
  const ManyShared<C> shared{SharedAddress(storage), q, a.slots};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), 1);
      BarrierInit(shared.Empty(slot), C::kCluster * C::kConsumers * 4);
    }
    BarrierInitFence();
  }
  if constexpr (C::kForm == Form::kExpanded) {
    const int gap = (C::ValueRoom(q) - C::ValueBytes(q)) / 4;
    for (int i = threadIdx.x; i < a.slots * gap; i += C::kThreads) {
      const uint32_t at = i / gap * C::StageBytes(q) + C::ValueBytes(q) + i % gap * 4;
      *reinterpret_cast<uint32_t*>(storage + at) = 0;
    }
  }
  ClusterBarrier();

  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (warpgroup == C::kConsumers) {
    ReleaseRegisters<C::kProducerRegisters>();
    if (threadIdx.x == C::kConsumers * kWarpgroupSize) Produce<C>(a, shared);
  } else {
    ClaimRegisters<C::kConsumerRegisters>();
    ManyConsumer<C> consumer(a, shared, warpgroup);
    for (int index = FirstTile<C>(); index < a.order.tiles; index += TileStride<C>()) {
      consumer.Run(TileOfBlock<C>(a, index));
    }
    consumer.Finish();
  }
  ClusterBarrier();  // nobody copies into or arrives in a block that has ended
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_MANY_TOKENS_CUH_
