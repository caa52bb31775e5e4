// Many tokens times vector-wise (1, L) or block-wise (b, b) weights on Hopper's tensor cores, feature-major:
//
//   yᵀ[o, t] = act(scale[o] * sum_r values[r, o] xᵀ[row(r), t] + bias[o])      r: the kept rows of o's column block
//
// The weights are the M operand (64 columns of W a product), the gathered rows of xᵀ the N operand; both lie in memory
// as wgmma's MN-major layout wants them, one row r after the other, so nothing is transposed.
//
// Layouts. values [batch, windows, out_blocks, q, bk, bn]: in one column block, the q bk kept rows of a window are runs
//   of bn elements. x [batch, in_features, tokens] and y [batch, out_features, tokens] are contiguous along tokens.
// Stage. The reduction advances by stages of `rows` kept rows (a multiple of 16): whole windows where q bk is small,
//   otherwise a part of one window. Rows of a stage that no unit fills stay zero in both operands from the start.
// Ownership. A block (one per multiprocessor, persistent) owns a tile of kOut columns x kTokens tokens at a time.
//   Two consumer warpgroups own 64 x kMmaTokens of it each, in registers. The producer warpgroup copies the weights (one
//   thread, to all blocks of the cluster: they share the column tile) and gathers x by the units kept, which it lists
//   from the mask words, a chunk of windows ahead.
// Shared memory (bytes): ring of slots x rows x 128 x (kOutChunks + kTokenChunks), weights first; 2 x 2 x 8192 for
//   results on their way out; 2 x 320 x 4 lists of rows; 3 x 16 x 8 barriers. SharedBytes() adds them up.
// Synchronisation. full[slot]: weights and x of the slot have landed. empty[slot]: both consumers are done with the
//   slot of this block. shared_empty[slot]: consumers of every block of the cluster are; only the block that multicasts
//   the slot's weights (slot % kCluster) looks at its own. Stores of y are asynchronous: they overlap the next tile.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CUH_

#include "common/problem.h"
#include "cuda/device.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda::block {

// How rows of x reach shared memory.
enum class Gather {
  kBoxes,  // one box of the copy engine per unit and 64 tokens: pays from units of 16 rows on
  kLanes,  // 16 bytes per lane, four warps
};

template <class T_, int kOut_, int kTokens_, Gather kGather_>
struct Config {
  using T = T_;
  static constexpr int kOut = kOut_;
  static constexpr int kTokens = kTokens_;
  static constexpr Gather kGather = kGather_;
  static constexpr int kConsumers = 2;  // warpgroups; a third has no room for its 128 accumulators a thread
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kOutChunks = kOut / kChunk;
  static constexpr int kTokenChunks = kTokens / kChunk;
  static constexpr int kMmaTokens = kTokens * kOutChunks / kConsumers;  // consumers split the columns first
  static constexpr int kMaxSlots = 16;
  static constexpr int kListEntries = 320;  // of each of the two lists
  static constexpr uint32_t kZero = 1u << 31;
  static constexpr int kStoreBuffers = 2;  // per consumer, 64 columns x 64 tokens each
  static constexpr int kStoreBytes = kMmaRows * kLineBytes;

  static_assert(kOut == 64 || kOut == 128, "the two consumers split the columns of a tile or its tokens");
  static_assert(kMmaTokens % kChunk == 0 && kMmaTokens <= 256, "a product spans whole lines and at most 256 tokens");
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= 3 * 168,
                "the warpgroups share what the block was launched with, 168 registers a thread");

  __host__ __device__ static constexpr int StageBytes(int rows) {
    return rows * kLineBytes * (kOutChunks + kTokenChunks);
  }
  __host__ __device__ static constexpr int FixedBytes() {
    return kConsumers * kStoreBuffers * kStoreBytes + 2 * kListEntries * 4 + 2 * kMaxSlots * 8;
  }
};

struct Arguments {
  CUtensorMap values, x, y;
  Geometry geometry;
  const void* x_data;
  const uint32_t* mask;
  Epilogue epilogue;
  Result result;
  // Stages.
  int32_t rows;               // of a stage, a multiple of 16
  int32_t filled_rows;        // the rest stay zero
  int32_t slots;              // of the ring
  int32_t steps;              // stages of a tile
  int32_t windows_per_stage;  // 1 where a window takes several stages
  int32_t stages_per_window;  // 1 where a stage takes several windows
  int32_t run_rows;           // consecutive rows of x that one unit brings to a stage
  int32_t stages_per_unit;    // bk / run_rows
  // Lists: one entry per row (lanes) or per unit (boxes) of a stage; rows that no unit fills keep the entry they start with, zeros.
  int32_t entries_per_unit;
  int32_t entries_per_stage;
  int32_t entries_per_group;  // a group of windows: the windows of a stage, or one window of several stages
  int32_t groups_per_chunk;
  int32_t windows_per_chunk;
  int32_t stages_per_chunk;
  // Tiles: groups of `token_group` token tiles walk all column tiles together, so that their x stays in the L2 cache.
  int32_t token_group;
  int32_t token_tiles;
  int32_t out_tiles;
  int32_t tiles;
};

struct Tile {
  int32_t batch, out, token;  // first column and token
  int32_t block, column;      // column block, and first column inside it
};

template <class C>
__device__ __forceinline__ Tile TileAt(const Arguments& a, int32_t index) {
  const int32_t per_batch = a.token_tiles * a.out_tiles;
  const int32_t batch = index / per_batch;
  const int32_t in_batch = index % per_batch;
  const int32_t per_group = a.token_group * a.out_tiles;
  const int32_t first = in_batch / per_group * a.token_group;
  const int32_t group = min(a.token_group, a.token_tiles - first);
  const int32_t in_group = in_batch % per_group;
  const int32_t out = in_group / group * C::kOut;
  const int32_t token = (first + in_group % group) * C::kTokens;
  return {batch, out, token, out / a.geometry.bn, out % a.geometry.bn};
}

// Addresses in shared memory.
template <class C>
struct SharedMap {
  uint32_t base;
  int rows;
  int slots;

  __device__ uint32_t Weights(int slot) const { return base + slot * C::StageBytes(rows); }
  __device__ uint32_t Inputs(int slot) const { return Weights(slot) + C::kOutChunks * ChunkBytes(); }
  __device__ uint32_t ChunkBytes() const { return rows * kLineBytes; }
  __device__ uint32_t Store(int consumer) const {
    return base + slots * C::StageBytes(rows) + consumer * C::kStoreBuffers * C::kStoreBytes;
  }
  __device__ uint32_t Lists() const { return Store(C::kConsumers); }
  __device__ uint32_t Full(int slot) const { return Lists() + 2 * C::kListEntries * 4 + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(C::kMaxSlots + slot); }
};

// ------------------------------------------------------------------------------------------------------- producers

// One warp of the producer warpgroup. All four list the kept units of a chunk of windows together (one chunk ahead, in
// the other of two lists), then gather their share of every stage of the chunk; warp 0 also copies the weights.
template <class C>
class Producer {
 public:
  using T = typename C::T;

  __device__ Producer(const Arguments& a, const SharedMap<C>& shared, uint32_t* lists)
      : a_(a), shared_(shared), lists_(lists), warp_(threadIdx.x / kWarpSize % 4), lane_(threadIdx.x % kWarpSize) {
    window_offset_ = lane_ / a.windows_per_stage * a.entries_per_group +
                     lane_ % a.windows_per_stage * a.geometry.q * a.entries_per_unit;
  }

  __device__ void Run() {
    index_ = blockIdx.x;
    if (index_ >= a_.tiles) return;
    listed_ = TileAt<C>(a_, index_);
    LoadWord();
    ListChunk(lists_);
    NextChunk();
    uint32_t* list = lists_;
    uint32_t* other = lists_ + C::kListEntries;
    for (int index = blockIdx.x; index < a_.tiles; index += gridDim.x) {
      const Tile tile = TileAt<C>(a_, index);
      int steps = a_.steps;
      for (int window = 0; steps > 0; window += a_.windows_per_chunk) {
        NamedBarrier(kBarrier, kWarpgroupSize);  // `list` is whole, and nobody reads `other` any more
        if (index_ < a_.tiles) {
          ListChunk(other);
          NextChunk();
        }
        const int here = min(steps, a_.stages_per_chunk);
        CopyStages(tile, window, here, list);
        steps -= here;
        uint32_t* const swap = list;
        list = other;
        other = swap;
      }
    }
  }

 private:
  static constexpr int kBarrier = 1 + C::kConsumers;
  static constexpr int kTokensPerPiece = 16 / sizeof(T);
  static constexpr int kPieces = C::kTokens / kTokensPerPiece;  // of a row of x
  static constexpr int kLanesPerRow = kPieces < kWarpSize ? kPieces : kWarpSize;
  static constexpr int kRowsPerPass = kWarpSize / kLanesPerRow;

  // Lane l's mask word: that of window l of the chunk, zero beyond the last window.
  __device__ void LoadWord() {
    const Geometry& g = a_.geometry;
    const int64_t window = int64_t{listed_window_} + lane_;
    const bool inside = lane_ < a_.windows_per_chunk && window < g.windows;
    word_ = inside ? __ldg(a_.mask + (listed_.batch * g.windows + window) * g.out_blocks + listed_.block) : 0;
    if (g.window_units < kMaskBits) word_ &= (1u << g.window_units) - 1;
  }

  __device__ void NextChunk() {
    listed_window_ += a_.windows_per_chunk;
    if (listed_window_ >= a_.geometry.windows) {
      listed_window_ = 0;
      index_ += gridDim.x;
      if (index_ >= a_.tiles) return;
      listed_ = TileAt<C>(a_, index_);
    }
    LoadWord();
  }

  // What a list holds for the rows that start at `row` of x: for lanes a readable row, with kZero where it stands for
  // zeros; for boxes the row itself, since the copy engine reads zeros beyond in_features.
  __device__ uint32_t Entry(int64_t row) const {
    const int64_t rows = a_.geometry.in_features;
    if (C::kGather == Gather::kBoxes) return static_cast<uint32_t>(min(row, rows));
    return row < rows ? static_cast<uint32_t>(row) : static_cast<uint32_t>(rows - 1) | C::kZero;
  }

  // The i-th kept unit of a window has the entries i * entries_per_unit and on of that window's list. Lanes take windows,
  // warps take a quarter of their bits each. Where a corrupt mask has too few bits the last unit of the window stands in.
  __device__ void ListChunk(uint32_t* list) const {
    const Geometry& g = a_.geometry;
    if (lane_ >= a_.windows_per_chunk) return;
    const int64_t window_row = (int64_t{listed_window_} + lane_) * g.window_units * g.bk;
    uint32_t* const window_list = list + window_offset_;
    const uint32_t quarter = 0xffu << 8 * warp_;
    int rank = __popc(word_ & (quarter - 1) & ~quarter);
    for (uint32_t bits = word_ & quarter; bits != 0 && rank < g.q; bits &= bits - 1, ++rank) {
      PutUnit(window_list, rank, window_row + (__ffs(bits) - 1) * g.bk);
    }
    if (warp_ != 3) return;
    for (rank = __popc(word_); rank < g.q; ++rank) PutUnit(window_list, rank, window_row + (g.window_units - 1) * g.bk);
  }

  __device__ void PutUnit(uint32_t* window_list, int rank, int64_t row) const {
    for (int i = 0; i < a_.entries_per_unit; ++i) window_list[rank * a_.entries_per_unit + i] = Entry(row + i);
  }

  __device__ void CopyStages(const Tile& tile, int window, int steps, const uint32_t* list) {
    const Geometry& g = a_.geometry;
    const T* const x = static_cast<const T*>(a_.x_data) + tile.batch * g.in_features * g.tokens + tile.token;
    const int tokens = min(C::kTokens, static_cast<int>(g.tokens) - tile.token);
    int part = 0, values_row = 0;
    for (int step = 0; step < steps; ++step, at_.Advance(a_.slots)) {
      if constexpr (C::kGather == Gather::kLanes) {
        GatherLanes(tile, window, values_row, x, tokens, list);
      } else {
        BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
        if (ElectOne()) GatherBoxes(tile, window, values_row, part * a_.run_rows, list);
        __syncwarp();
      }
      // The next stage: of the same unit, of the same window, or of the next windows.
      if (++part == a_.stages_per_unit) {
        part = 0;
        list += a_.entries_per_stage;
      }
      values_row += a_.rows;
      if (values_row >= a_.rows * a_.stages_per_window) {
        values_row = 0;
        window += a_.windows_per_stage;
      }
    }
  }

  // One thread.
  __device__ void CopyWeights(const Tile& tile, int window, int row) {
#pragma unroll
    for (int chunk = 0; chunk < C::kOutChunks; ++chunk) {
      LoadBox(shared_.Weights(at_.slot) + chunk * shared_.ChunkBytes(), &a_.values, shared_.Full(at_.slot),
              tile.column + chunk * kChunk, row, tile.block, window, tile.batch);
    }
  }

  // Warps own 64-token chunks; where there are fewer chunks than warps, several share one and take turns.
  __device__ void GatherBoxes(const Tile& tile, int window, int values_row, int row_in_unit, const uint32_t* list) {
    constexpr int kTurns = C::kTokenChunks < 4 ? 4 / C::kTokenChunks : 1;
    const int chunk = warp_ % C::kTokenChunks;
    if (warp_ == 0) {
      BarrierArriveExpect(shared_.Full(at_.slot), a_.filled_rows * kLineBytes * (C::kOutChunks + C::kTokenChunks));
      CopyWeights(tile, window, values_row);
    }
    for (int unit = warp_ / C::kTokenChunks; unit < a_.entries_per_stage; unit += kTurns) {
      const int row = static_cast<int>(list[unit]) + row_in_unit;
      const uint32_t line = shared_.Inputs(at_.slot) + unit * a_.run_rows * kLineBytes;
#pragma unroll
      for (int i = 0; i < C::kTokenChunks; i += 4) {
        LoadBox(line + (chunk + i) * shared_.ChunkBytes(), &a_.x, shared_.Full(at_.slot),
                tile.token + (chunk + i) * kChunk, row, tile.batch);
      }
    }
  }

  // Four warps copy 16 rows in a round, kRowsPerPass rows of each warp at once, so that the swizzle phase of a lane's
  // row (row % 8) takes at most two values.
  __device__ void GatherLanes(const Tile& tile, int window, int values_row, const T* x, int tokens,
                              const uint32_t* list) {
    constexpr int kPasses = 4 / kRowsPerPass;  // of a round
    constexpr int kFar = kPieces / kLanesPerRow;
    constexpr int kRounds = 4;
    const int piece = lane_ % kLanesPerRow;
    const int first = warp_ * kRowsPerPass + lane_ / kLanesPerRow;
    uint32_t entry[kRounds][kPasses];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round * 16 < a_.rows) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) entry[round][i] = list[round * 16 + first + i * 4 * kRowsPerPass];
      }
    }
    // Lanes beyond the last token copy nothing, and point at the tensor's first element.
    const char* from[kFar];
    uint32_t pitch[kFar], bytes[kFar];
#pragma unroll
    for (int far = 0; far < kFar; ++far) {
      const int token = piece * kTokensPerPiece + far * kWarpSize * kTokensPerPiece;
      const bool inside = token < tokens;
      from[far] = reinterpret_cast<const char*>(inside ? x + token : static_cast<const T*>(a_.x_data));
      pitch[far] = inside ? static_cast<uint32_t>(a_.geometry.tokens) * sizeof(T) : 0;
      bytes[far] = inside ? 16 : 0;
    }
    BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
    if (warp_ == 0) {
      if (ElectOne()) {
        BarrierArriveExpect(shared_.Full(at_.slot), a_.filled_rows * kLineBytes * C::kOutChunks);
        CopyWeights(tile, window, values_row);
      }
      __syncwarp();
    }
    const uint32_t to = shared_.Inputs(at_.slot) + piece / 8 * shared_.ChunkBytes() + first * kLineBytes;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round * 16 < a_.rows) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          constexpr uint32_t kPhases = 8;
          const uint32_t swizzled = (piece ^ (first + i * 4 * kRowsPerPass)) % kPhases * 16;
          const uint32_t line = to + (round * 16 + i * 4 * kRowsPerPass) * kLineBytes + swizzled;
          const uint32_t source = entry[round][i];
#pragma unroll
          for (int far = 0; far < kFar; ++far) {
            CopyAsync16(line + far * (kWarpSize / 8) * shared_.ChunkBytes(),
                        from[far] + static_cast<uint64_t>(source & ~C::kZero) * pitch[far],
                        source & C::kZero ? 0 : bytes[far]);
          }
        }
      }
    }
    BarrierArriveAfterCopies(shared_.Full(at_.slot));
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  uint32_t* const lists_;
  const int warp_, lane_;
  int window_offset_;  // of window `lane_` of a chunk in its list
  RingPosition at_;
  // The chunk that will be listed next.
  int index_ = 0, listed_window_ = 0;
  Tile listed_;
  uint32_t word_ = 0;
};

// ------------------------------------------------------------------------------------------------------- consumers

// A warpgroup: accumulates its part d of the tile, 64 columns x kMmaTokens tokens, and sends it out.
template <class C>
class Consumer {
 public:
  static constexpr int kValues = C::kMmaTokens / 2;  // accumulators of a thread

  __device__ Consumer(const Arguments& a, const SharedMap<C>& shared, int consumer)
      : a_(a), shared_(shared), consumer_(consumer), warp_(threadIdx.x / kWarpSize % 4),
        lane_(threadIdx.x % kWarpSize), leader_(threadIdx.x % kWarpgroupSize == 0) {
    const int out_chunk = C::kOutChunks == 2 ? consumer : 0;
    const int token_chunk = C::kOutChunks == 2 ? 0 : consumer * (C::kMmaTokens / kChunk);
    weights_offset_ = out_chunk * shared.ChunkBytes();
    inputs_offset_ = token_chunk * shared.ChunkBytes();
    out_offset_ = out_chunk * kChunk;
    token_offset_ = token_chunk * kChunk;
  }

  __device__ void Run(const Tile& tile) {
    float d[kValues];
    Reduce(d);
    const int out = tile.out + out_offset_ + warp_ * 16 + lane_ / 4;
    if (HasAffine()) {
      const float2 affine[2] = {ScaleAndBias(tile.batch, out), ScaleAndBias(tile.batch, out + 8)};
#pragma unroll
      for (int i = 0; i < kValues; ++i) d[i] = fmaf(d[i], affine[i / 2 % 2].x, affine[i / 2 % 2].y);
    }
    if (a_.epilogue.activation != Activation::kNone) ApplyActivation(d);
    if (a_.result.dtype == DType::kF32) {
      StoreFloats(d, tile, out);
    } else if (a_.result.dtype == DType::kF16) {
      StoreBoxes<__half2>(d, tile);
    } else {
      StoreBoxes<__nv_bfloat162>(d, tile);
    }
  }

 private:
  // Warp by warp: each has read its part of x and seen its own products end.
  __device__ void Release(int slot) {
    if (lane_ == 0) BarrierArrive(shared_.Empty(slot));
  }

  // A slot is given back when its products are done. They run while the next slot is awaited; where that has not landed
  // yet there is nothing to overlap, and the slot is given back first.
  __device__ void AwaitSlot(int& pending) {
    if (pending >= 0 && !__all_sync(~0u, BarrierTest(shared_.Full(at_.slot), at_.parity))) {
      MmaWait<0>();
      Release(pending);
      pending = -1;
    }
    BarrierWait(shared_.Full(at_.slot), at_.parity);
  }

  __device__ bool HasAffine() const { return a_.epilogue.scales != nullptr || a_.epilogue.bias.data != nullptr; }
  __device__ float2 ScaleAndBias(int batch, int out) const {
    const Geometry& g = a_.geometry;
    float2 result = make_float2(1.0f, 0.0f);
    if (out >= g.out_features) return result;
    const int64_t at = batch * g.out_features + out;
    if (a_.epilogue.scales != nullptr) result.x = a_.epilogue.scales[at];
    if (a_.epilogue.bias.data != nullptr) result.y = LoadAsFloat(a_.epilogue.bias, at);
    return result;
  }

  // A loop over groups of accumulators, so that the code of the activation is there 8 times and not 128: registers
  // cannot be indexed, hence the unrolled selections.
  __device__ void ApplyActivation(float (&d)[kValues]) {
    constexpr int kGroup = 8;
#pragma unroll 1
    for (int group = 0; group < kValues / kGroup; ++group) {
      float v[kGroup];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (i / kGroup == group) v[i % kGroup] = d[i];
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = Activate(a_.epilogue.activation, v[i]);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (i / kGroup == group) d[i] = v[i % kGroup];
      }
    }
  }

  // A box of results passes through shared memory, one line of 64 tokens per column, swizzled: the eight rows that one
  // stmatrix phase writes fall into different banks. The buffers take turns.
  __device__ uint32_t AwaitStoreBuffer() {
    const uint32_t buffer = shared_.Store(consumer_) + store_buffer_ * C::kStoreBytes;
    store_buffer_ = (store_buffer_ + 1) % C::kStoreBuffers;
    if (leader_) StoreWaitRead<C::kStoreBuffers - 1>();
    NamedBarrier(1 + consumer_, kWarpgroupSize);
    return buffer;
  }
  __device__ void SendStoreBuffer(uint32_t buffer, int token, int out, int batch) {
    ProxyFence();
    NamedBarrier(1 + consumer_, kWarpgroupSize);
    if (leader_) {
      StoreBox(&a_.y, buffer, token, out, batch);
      StoreCommit();
    }
  }
  __device__ static uint32_t Swizzled(uint32_t buffer, int line, int piece) {
    return buffer + line * kLineBytes + (piece ^ line % 8) * 16;
  }
  template <class Pair>
  __device__ static uint32_t Round(float low, float high) {
    Pair rounded;
    if constexpr (std::is_same_v<Pair, __half2>) {
      rounded = __floats2half2_rn(low, high);
    } else {
      rounded = __floats2bfloat162_rn(low, high);
    }
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof(bits));
    return bits;
  }

  __device__ void Reduce(float (&d)[kValues]) {
    const int depths = a_.rows / kMmaDepth;
    int pending = -1;
    for (int step = 0; step < a_.steps; ++step, at_.Advance(a_.slots)) {
      AwaitSlot(pending);
      if (C::kGather == Gather::kLanes) ProxyFence();
      uint64_t weights = MmaDescriptor(shared_.Weights(at_.slot) + weights_offset_, shared_.ChunkBytes());
      uint64_t inputs = MmaDescriptor(shared_.Inputs(at_.slot) + inputs_offset_, shared_.ChunkBytes());
      MmaFence();
#ifndef NMS_SKIP_MATH
#pragma unroll 1
      for (int depth = 0; depth < depths; ++depth) {
        Mma<typename C::T, C::kMmaTokens>(d, weights, inputs, step + depth);
        weights += kMmaDepth * kLineBytes / 16;
        inputs += kMmaDepth * kLineBytes / 16;
      }
#endif
      MmaCommit();
      MmaWait<1>();
      if (pending >= 0) Release(pending);
      pending = at_.slot;
    }
    MmaWait<0>();
    Release(pending);
  }

  template <class Pair>
  __device__ void StoreBoxes(const float (&d)[kValues], const Tile& tile) {
#pragma unroll
    for (int chunk = 0; chunk < C::kMmaTokens / kChunk; ++chunk) {
      const uint32_t buffer = AwaitStoreBuffer();
#pragma unroll
      for (int pair = 0; pair < kChunk / 16; ++pair) {
        const float* v = d + chunk * 32 + pair * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         Swizzled(buffer, warp_ * 16 + lane_ % 16, pair * 2 + lane_ / 16)),
                     "r"(Round<Pair>(v[0], v[1])), "r"(Round<Pair>(v[2], v[3])),
                     "r"(Round<Pair>(v[4], v[5])), "r"(Round<Pair>(v[6], v[7]))
                     : "memory");
      }
      SendStoreBuffer(buffer, tile.token + token_offset_ + chunk * kChunk, tile.out + out_offset_, tile.batch);
    }
  }

  __device__ void StoreFloats(const float (&d)[kValues], const Tile& tile, int out) {
    const Geometry& g = a_.geometry;
    const int first_token = tile.token + token_offset_ + lane_ % 4 * 2;
    float* y = static_cast<float*>(a_.result.data) + (tile.batch * g.out_features + out) * g.tokens + first_token;
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const int half = i / 2 % 2, offset = i / 4 * 8;
      if (out + 8 * half < g.out_features && first_token + offset < g.tokens) {
        *reinterpret_cast<float2*>(y + 8 * half * g.tokens + offset) = make_float2(d[i], d[i + 1]);
      }
    }
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  const int consumer_, warp_, lane_;
  const bool leader_;
  uint32_t weights_offset_, inputs_offset_;
  int out_offset_, token_offset_;
  RingPosition at_;
  int store_buffer_ = 0;
};

// ---------------------------------------------------------------------------------------------------------- kernel

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) ManyTokens(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap<C> shared{SharedAddress(storage), a.rows, a.slots};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    constexpr int kArrivals = C::kGather == Gather::kBoxes ? 1 : 1 + kWarpgroupSize;
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), kArrivals);
      BarrierInit(shared.Empty(slot), C::kConsumers * 4);
    }
    BarrierInitFence();
  }
  // Zeros for the rows of a stage that no unit fills. (The stages as a whole: it happens once.)
  if (a.filled_rows < a.rows) {
    uint4* const stages = reinterpret_cast<uint4*>(storage);
    for (int i = threadIdx.x; i < a.slots * C::StageBytes(a.rows) / 16; i += C::kThreads) stages[i] = uint4{};
  }
  uint32_t* const lists = reinterpret_cast<uint32_t*>(storage + (shared.Lists() - shared.base));
  for (int i = threadIdx.x; i < 2 * C::kListEntries; i += C::kThreads) {
    lists[i] = C::kGather == Gather::kBoxes ? static_cast<uint32_t>(a.geometry.in_features) : C::kZero;
  }
  ProxyFence();
  __syncthreads();

  if (warpgroup >= C::kConsumers) {
    ReleaseRegisters<C::kProducerRegisters>();
    Producer<C>(a, shared, lists).Run();
  } else {
    ClaimRegisters<C::kConsumerRegisters>();
    Consumer<C> consumer(a, shared, warpgroup);
    for (int index = blockIdx.x; index < a.tiles; index += gridDim.x) consumer.Run(TileAt<C>(a, index));
    if (threadIdx.x % kWarpgroupSize == 0) StoreWaitRead<0>();
  }
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CUH_
