// What the producers and consumers of block_many_tokens.cuh agree on: tile shapes, a launch's arguments, shared memory.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_TILES_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_TILES_CUH_

#include "cuda/feature_major.cuh"
#include "cuda/split_output.cuh"

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
  // Tiles so narrow that few tokens leave multiprocessors idle: a cluster of blocks shares the reduction of a tile.
  static constexpr bool kSplits = kGather == Gather::kLanes && kTokens <= 128;
  static constexpr int kConsumers = 2;  // warpgroups; a third has no room for its 128 accumulators a thread
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
  // Lanes that bring two pieces of a row each spill at 88.
  static constexpr int kProducerRegisters = kGather == Gather::kLanes && kTokens > 256 ? 104 : 88;
  static constexpr int kConsumerRegisters = kProducerRegisters == 104 ? 200 : 208;
  static constexpr int kOutChunks = kOut / kChunk;
  static constexpr int kTokenChunks = kTokens / kChunk;
  static constexpr int kMmaTokens = kTokens * kOutChunks / kConsumers;  // consumers split the columns first
  static constexpr int kMaxSlots = 16;
  static constexpr int kListEntries = 320;  // of each of the two lists
  static constexpr uint32_t kZero = 1u << 31;
  static constexpr int kOutputBarriers = 2;  // of a consumer, where blocks share tiles
  using Output = std::conditional_t<kSplits, SplitOutput<kMmaTokens>, TileOutput<kMmaTokens, 2>>;

  static_assert(kOut == 64 || kOut == 128, "the two consumers split the columns of a tile or its tokens");
  static_assert(kMmaTokens % (kSplits ? kChunk / 2 : kChunk) == 0 && kMmaTokens <= 256,
                "a product spans at most 256 tokens, and the copy engine takes whole lines of results");
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= 3 * 168,
                "the warpgroups share what the block was launched with, 168 registers a thread");

  __host__ __device__ static constexpr int StageBytes(int rows) {
    return rows * kLineBytes * (kOutChunks + kTokenChunks);
  }
  __host__ __device__ static constexpr int FixedBytes() {
    return 2 * kListEntries * 4 + 2 * kMaxSlots * 8 + kConsumers * kOutputBarriers * 8;
  }
};

struct Arguments {
  CUtensorMap values, x;
  const void* x_data;
  const uint32_t* mask;
  OutputArguments output;
  TileOrder order;
  // Stages.
  int32_t rows;               // of a stage, a multiple of 16
  int32_t filled_rows;        // the rest stay zero
  int32_t slots;              // of the ring
  int32_t groups;             // of a tile's stages: the stages of a window, or one stage
  int32_t splits;             // blocks of a cluster, which share the stages of a tile
  int32_t output_bytes;       // of shared memory, of both consumers
  int32_t windows_per_stage;  // 1 where a window takes several stages
  int32_t stages_per_window;  // 1 where a stage takes several windows
  int32_t run_rows;           // consecutive rows of x that one unit brings to a stage
  int32_t stages_per_unit;    // bk / run_rows
  // Lists: one entry per row (lanes) or per unit (boxes) of a stage; rows that no unit fills keep the entry they start
  // with, zeros.
  int32_t entries_per_unit;
  int32_t entries_per_stage;
  int32_t entries_per_group;  // a group of windows: the windows of a stage, or one window of several stages
  int32_t groups_per_chunk;
  int32_t windows_per_chunk;
  int32_t stages_per_chunk;
};

// A block's tiles, and its part of the stages of each.
struct Share {
  int32_t first_tile, tile_stride;
  int32_t first_window, end_window, steps;

  __device__ explicit Share(const Arguments& a) : first_tile(blockIdx.x / a.splits), tile_stride(gridDim.x / a.splits) {
    const int rank = blockIdx.x % a.splits;
    const auto begin_of = [&](int64_t r) { return static_cast<int32_t>(a.groups * r / a.splits); };
    const int32_t first = begin_of(rank), end = begin_of(rank + 1);
    first_window = first * a.windows_per_stage;
    end_window = end * a.windows_per_stage;
    steps = (end - first) * a.stages_per_window;
  }
};

struct BlockTile : Tile {
  int32_t block, column;  // column block, and first column inside it
};

template <class C>
__device__ __forceinline__ BlockTile TileAt(const Arguments& a, int32_t index) {
  const Tile tile = a.order.At<C::kOut, C::kTokens>(index);
  const int32_t bn = a.output.geometry.bn;
  return {tile, tile.out / bn, tile.out % bn};
}

// Addresses in shared memory.
template <class C>
struct SharedMap {
  uint32_t base;
  int rows;
  int slots;
  int output_bytes;

  __device__ uint32_t Weights(int slot) const { return base + slot * C::StageBytes(rows); }
  __device__ uint32_t Inputs(int slot) const { return Weights(slot) + C::kOutChunks * ChunkBytes(); }
  __device__ uint32_t ChunkBytes() const { return rows * kLineBytes; }
  __device__ uint32_t Output() const { return base + slots * C::StageBytes(rows); }
  __device__ uint32_t Lists() const { return Output() + output_bytes; }
  __device__ uint32_t Full(int slot) const { return Lists() + 2 * C::kListEntries * 4 + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(C::kMaxSlots + slot); }
  __device__ uint32_t OutputBarriers(int consumer) const {
    return Full(2 * C::kMaxSlots + consumer * C::kOutputBarriers);
  }
};

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_TILES_CUH_
