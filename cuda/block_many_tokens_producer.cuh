// The producer warpgroup of block_many_tokens.cuh: lists the kept rows, copies weights, gathers x.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_PRODUCER_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_PRODUCER_CUH_

#include "cuda/block_many_tokens_tiles.cuh"

namespace nmsparse::cuda::block {

// One warp of the producer warpgroup. All four list the kept units of a chunk of windows together (one chunk ahead, in
// the other of two lists), then gather their share of every stage of the chunk and take turns in copying weights.
template <class C>
class Producer {
 public:
  using T = typename C::T;

  __device__ Producer(const Arguments& a, const SharedMap<C>& shared, const Share& share, uint32_t* lists)
      : a_(a),
        shared_(shared),
        share_(share),
        lists_(lists),
        warp_(threadIdx.x / kWarpSize % 4),
        lane_(threadIdx.x % kWarpSize) {
    // Which unit of which window of a chunk each of this thread's list positions holds: the same for every chunk.
    const int entries_per_window = a.output.geometry.q * a.entries_per_unit;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int position = threadIdx.x % kWarpgroupSize + i * kWarpgroupSize;
      const int group = position / a.entries_per_group, in_group = position % a.entries_per_group;
      const int window = in_group / entries_per_window, entry = in_group % entries_per_window;
      holds_[i] = group < a.groups_per_chunk && window < a.windows_per_stage
                      ? (group * a.windows_per_stage + window) | entry / a.entries_per_unit << kRankShift |
                            entry % a.entries_per_unit << kRowShift
                      : kNothing;
    }
  }

  __device__ void Run() {
    index_ = share_.first_tile;
    listed_window_ = share_.first_window;
    if (index_ >= a_.order.tiles) return;
    listed_ = TileAt<C>(a_, index_);
    LoadWord();
    ListChunk(lists_);
    NextChunk();
    uint32_t* list = lists_;
    uint32_t* other = lists_ + C::kListEntries;
    for (int index = share_.first_tile; index < a_.order.tiles; index += share_.tile_stride) {
      const BlockTile tile = TileAt<C>(a_, index);
      int steps = share_.steps;
      for (int window = share_.first_window; steps > 0; window += a_.windows_per_chunk) {
        NamedBarrier(kBarrier, kWarpgroupSize);  // `list` is whole, and nobody reads `other` any more
        if (index_ < a_.order.tiles) {
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
  static constexpr int kPositions = (C::kListEntries + kWarpgroupSize - 1) / kWarpgroupSize;
  static constexpr int kRankShift = 5, kRowShift = 10, kNothing = -1;
  static constexpr int kTokensPerPiece = 16 / sizeof(T);
  static constexpr int kPieces = C::kTokens / kTokensPerPiece;  // of a row of x
  static constexpr int kLanesPerRow = kPieces < kWarpSize ? kPieces : kWarpSize;
  static constexpr int kRowsPerPass = kWarpSize / kLanesPerRow;
  static constexpr int kFar = kPieces / kLanesPerRow;

  // Lane l's mask word: that of window l of the chunk, zero beyond the last window.
  __device__ void LoadWord() {
    const Geometry& g = a_.output.geometry;
    const int64_t window = int64_t{listed_window_} + lane_;
    const bool inside = lane_ < a_.windows_per_chunk && window < g.windows;
    word_ = inside ? __ldg(a_.mask + (listed_.batch * g.windows + window) * g.out_blocks + listed_.block) : 0;
    if (g.window_units < kMaskBits) word_ &= (1u << g.window_units) - 1;
  }

  __device__ void NextChunk() {
    listed_window_ += a_.windows_per_chunk;
    if (listed_window_ >= share_.end_window) {
      listed_window_ = share_.first_window;
      index_ += share_.tile_stride;
      if (index_ >= a_.order.tiles) return;
      listed_ = TileAt<C>(a_, index_);
    }
    LoadWord();
  }

  // Position of the set bit of `bits` that has `rank` set bits below it; the last unit of the window where a corrupt
  // mask has too few.
  __device__ int UnitOfRank(uint32_t bits, int rank) const {
    if (rank >= __popc(bits)) return a_.output.geometry.window_units - 1;
    int unit = 0;
#pragma unroll
    for (int width = kMaskBits / 2; width > 0; width /= 2) {
      const int below = __popc(bits & ((1u << width) - 1));
      if (rank >= below) {
        rank -= below;
        bits >>= width;
        unit += width;
      }
    }
    return unit;
  }

  // An entry is a row of x. For lanes it is readable, with kZero where it stands for zeros; for boxes it may lie beyond
  // in_features, where the copy engine reads zeros.
  __device__ void ListChunk(uint32_t* list) const {
    const Geometry& g = a_.output.geometry;
    const int rows = static_cast<int>(g.in_features);
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int held = holds_[i];
      const uint32_t bits = __shfl_sync(~0u, word_, held & (kWarpSize - 1));
      if (held == kNothing) continue;
      const int window = held & (kWarpSize - 1), rank = held >> kRankShift & (kWarpSize - 1);
      const int unit = (listed_window_ + window) * g.window_units + UnitOfRank(bits, rank);
      const int row = unit * g.bk + (held >> kRowShift);
      const bool inside = row < rows;
      list[threadIdx.x % kWarpgroupSize + i * kWarpgroupSize] = C::kGather == Gather::kBoxes ? min(row, rows)
                                                                : inside                     ? row
                                                                                             : (rows - 1) | C::kZero;
    }
  }

  // Where a lane reads its pieces of a row of x. Lanes beyond the last token copy nothing and point at the tensor's
  // first element.
  struct LaneSource {
    const char* from[kFar];
    uint32_t pitch[kFar], bytes[kFar];
  };

  __device__ LaneSource SourceOf(const BlockTile& tile) const {
    const Geometry& g = a_.output.geometry;
    const T* const x = static_cast<const T*>(a_.x_data);
    LaneSource source;
#pragma unroll
    for (int far = 0; far < kFar; ++far) {
      const int token = tile.token + (lane_ % kLanesPerRow + far * kWarpSize) * kTokensPerPiece;
      const bool inside = token < g.tokens;
      source.from[far] =
          reinterpret_cast<const char*>(x + (inside ? tile.batch * g.in_features * g.tokens + token : 0));
      source.pitch[far] = inside ? static_cast<uint32_t>(g.tokens) * sizeof(T) : 0;
      source.bytes[far] = inside ? 16 : 0;
    }
    return source;
  }

  __device__ void CopyStages(const BlockTile& tile, int window, int steps, const uint32_t* list) {
    LaneSource source;
    if constexpr (C::kGather == Gather::kLanes) source = SourceOf(tile);
    int part = 0, values_row = 0;
    for (int step = 0; step < steps; ++step, at_.Advance(a_.slots)) {
      if constexpr (C::kGather == Gather::kLanes) {
        GatherLanes(tile, window, values_row, source, list);
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
  __device__ void CopyWeights(const BlockTile& tile, int window, int row) {
#pragma unroll
    for (int chunk = 0; chunk < C::kOutChunks; ++chunk) {
      LoadBox(shared_.Weights(at_.slot) + chunk * shared_.ChunkBytes(), &a_.values, shared_.Full(at_.slot),
              tile.column + chunk * kChunk, row, tile.block, window, tile.batch);
    }
  }

  // Warps own 64-token chunks; where there are fewer chunks than warps, several share one and take turns.
  __device__ void GatherBoxes(const BlockTile& tile, int window, int values_row, int row_in_unit,
                              const uint32_t* list) {
    constexpr int kTurns = C::kTokenChunks < 4 ? 4 / C::kTokenChunks : 1;
    const int chunk = warp_ % C::kTokenChunks;
    if (warp_ == at_.slot % 4) {
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
  // row (row % 8) takes at most two values. The warps take turns in copying the weights.
  __device__ void GatherLanes(const BlockTile& tile, int window, int values_row, const LaneSource& source,
                              const uint32_t* list) {
    constexpr int kPasses = 4 / kRowsPerPass;  // of a round
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
    BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
    if (warp_ == at_.slot % 4) {
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
          CopyPieces(to + (round * 16 + i * 4 * kRowsPerPass) * kLineBytes + swizzled, source, entry[round][i]);
        }
      }
    }
    BarrierArriveAfterCopies(shared_.Full(at_.slot));
  }

  __device__ void CopyPieces(uint32_t to, const LaneSource& source, uint32_t entry) {
#pragma unroll
    for (int far = 0; far < kFar; ++far) {
      CopyAsync16(to + far * (kWarpSize / 8) * shared_.ChunkBytes(),
                  source.from[far] + static_cast<uint64_t>(entry & ~C::kZero) * source.pitch[far],
                  entry & C::kZero ? 0 : source.bytes[far]);
    }
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  const Share share_;
  uint32_t* const lists_;
  const int warp_, lane_;
  int holds_[kPositions];  // window, rank and row of the unit at this thread's positions of a list, or kNothing
  RingPosition at_;
  // The chunk that will be listed next.
  int index_, listed_window_;
  BlockTile listed_;
  uint32_t word_ = 0;
};

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_PRODUCER_CUH_
