// Gradient by the values on Hopper's tensor cores, many tokens:
//
//   dv = xᵀ g at the kept units:   dv[j, c] = sum_t x[t, row(j)] g[t, c]
//
// The columns of g are the M operand (64 of them a product), rows of xᵀ the N operand; both are K-major, since x
// [batch, in_features, tokens] and g [batch, out_features, tokens] are contiguous along the tokens, which are summed
// over. dv [batch, windows, out_blocks, q, bk, bn] is plain.
//
// Rows. Of vector- and block-wise weights a tile takes the rows that one column block keeps, counted over all windows,
//   so that the work is that of the kept units. Element-wise weights have the dense work: a tile takes whole windows,
//   and every column writes the products that it keeps.
// Step. 64 tokens: a line of 128 bytes for every column and every row of the tile.
// Ownership. A block owns a tile of kColumns columns x kRows rows at a time. Two consumer warpgroups own 64 columns x
//   256 rows of it each, in registers. The producer warpgroup copies g (one thread, by the copy engine) and gathers
//   kept rows (cp.async: a thread brings 16 bytes of every 16th row of the tile); which rows is known once per tile and
//   read from the mask then, so a step costs addresses of one addition. Whole windows are copied by the copy engine,
//   too.
// Splits. Where the tiles are too few for the device, the blocks of a cluster share the steps of one tile; each adds up
//   a piece of the accumulators of all, in the order of their ranks (distributed shared memory).
// Shared memory (bytes): ring of slots x 128 x (kColumns + kRows), columns first, also the buffer of the pieces; 8 x
//   768 (kept rows) or 8 x 2048 (windows) for values on their way out; kRows x 4 kept rows of the tile; 2 x 8 x 8
//   barriers.
// Synchronisation. full[slot]: bytes have landed and, of kept rows, every producer thread's copies. empty[slot]: the
//   eight consumer warps are done with it. Named barrier 1: the producers and their list of rows.
#ifndef JAX_NMSPARSE_CUDA_SDDMM_WGMMA_CUH_
#define JAX_NMSPARSE_CUDA_SDDMM_WGMMA_CUH_

#include "cuda/sddmm_wgmma_consumer.cuh"

namespace nmsparse::cuda::sddmm {

// The producer warpgroup of Rows::kKept: all its threads gather.
template <class C>
class Gatherer {
 public:
  __device__ Gatherer(const Arguments& a, const SharedMap<C>& shared, uint32_t* list)
      : a_(a), shared_(shared), list_(list), thread_(threadIdx.x % kWarpgroupSize) {}

  __device__ void Run(int32_t tile_index, int begin, int end) {
    const Geometry& g = a_.geometry;
    const Tile tile = TileAt<C>(a_, tile_index);
    NamedBarrier(1, kWarpgroupSize);  // the list of the tile before has been read
    for (int i = thread_; i < C::kRows; i += kWarpgroupSize) {
      int64_t row = g.in_features;
      if (tile.row + i < a_.all_rows) row = KeptRow(a_, tile.batch, tile.block, KeptPosition(a_, tile.row + i));
      list_[i] = row < g.in_features ? static_cast<uint32_t>(row) : kZeroRow;
    }
    NamedBarrier(1, kWarpgroupSize);
    const int piece = thread_ % kPieces, first = thread_ / kPieces;
    uint32_t rows[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) rows[i] = list_[first + i * kRowsPerPass];

    const char* from =
        static_cast<const char*>(a_.x_data) + (tile.batch * g.in_features * g.tokens) * kBytes + piece * 16;
    const uint64_t pitch = g.tokens * kBytes;
    const uint32_t to = first * kLineBytes + (piece ^ first % 8) * 16;
    const int column = tile.block * g.bn + tile.column;
    for (int step = begin; step < end; ++step, at_.Advance(a_.slots)) {
      const uint32_t full = shared_.Full(at_.slot);
      BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
      if (thread_ == 0) {
        BarrierArriveExpect(full, C::kColumns * kLineBytes);
        LoadBox(shared_.Columns(at_.slot), &a_.g, full, step * kChunk, column, tile.batch);
      }
      // Pieces beyond the last token are zeros, like rows that do not exist; both read the tensor's first bytes.
      const bool inside = step * kChunk + piece * 8 < g.tokens;
      const char* const source = inside ? from + step * kLineBytes : static_cast<const char*>(a_.x_data);
      const uint64_t stride = inside ? pitch : 0;
      const uint32_t line = shared_.Rows(at_.slot) + to;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        CopyAsync16(line + i * kRowsPerPass * kLineBytes, source + (rows[i] & ~kZeroRow) * stride,
                    inside && !(rows[i] & kZeroRow) ? 16 : 0);
      }
      BarrierArriveAfterCopies(full);
    }
  }

 private:
  static constexpr int kBytes = 2;
  static constexpr int kPieces = kLineBytes / 16;
  static constexpr int kRowsPerPass = kWarpgroupSize / kPieces;
  static constexpr int kPasses = C::kRows / kRowsPerPass;

  const Arguments& a_;
  const SharedMap<C> shared_;
  uint32_t* const list_;
  const int thread_;
  RingPosition at_;
};

// The producer warpgroup of Rows::kAll: one thread copies.
template <class C>
class Copier {
 public:
  __device__ Copier(const Arguments& a, const SharedMap<C>& shared, uint32_t*) : a_(a), shared_(shared) {}

  __device__ void Run(int32_t tile_index, int begin, int end) {
    if (threadIdx.x % kWarpgroupSize != 0) return;
    constexpr int kBoxRows = 256;
    const Tile tile = TileAt<C>(a_, tile_index);
    for (int step = begin; step < end; ++step, at_.Advance(a_.slots)) {
      const uint32_t full = shared_.Full(at_.slot);
      BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
      BarrierArriveExpect(full, C::kStageBytes);
      LoadBox(shared_.Columns(at_.slot), &a_.g, full, step * kChunk, tile.block, tile.batch);
#pragma unroll
      for (int row = 0; row < C::kRows; row += kBoxRows) {
        LoadBox(shared_.Rows(at_.slot) + row * kLineBytes, &a_.x, full, step * kChunk, tile.row + row, tile.batch);
      }
    }
  }

 private:
  const Arguments& a_;
  const SharedMap<C> shared_;
  RingPosition at_;
};

template <class C>
using Producer = std::conditional_t<C::kRowsOf == Rows::kKept, Gatherer<C>, Copier<C>>;

// ---------------------------------------------------------------------------------------------------------- kernel

template <class C>
__global__ void __launch_bounds__(kThreads, 1) ManyTokens(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap<C> shared{SharedAddress(storage), a.slots};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), C::kRowsOf == Rows::kKept ? 1 + kWarpgroupSize : 1);
      BarrierInit(shared.Empty(slot), kConsumers * 4);
    }
    BarrierInitFence();
  }
  __syncthreads();

  const int rank = static_cast<int>(blockIdx.x) % a.splits;
  const int32_t first = static_cast<int32_t>(blockIdx.x) / a.splits,
                stride = static_cast<int32_t>(gridDim.x) / a.splits;
  const int begin = a.steps * rank / a.splits, end = a.steps * (rank + 1) / a.splits;
  if (warpgroup >= kConsumers) {
    ReleaseRegisters<kProducerRegisters>();
    Producer<C> producer(a, shared, reinterpret_cast<uint32_t*>(storage + (shared.List() - shared.base)));
    for (int32_t tile = first; tile < a.tiles; tile += stride) producer.Run(tile, begin, end);
    if (a.splits > 1) {
      __syncwarp();
      ClusterBarrier();
      ClusterBarrier();
    }
  } else {
    ClaimRegisters<kConsumerRegisters>();
    Consumer<C> consumer(a, shared, warpgroup);
    for (int32_t tile = first; tile < a.tiles; tile += stride) {
      consumer.Reduce(end - begin);
      if (a.splits == 1) consumer.Store(TileAt<C>(a, tile));
    }
    if (a.splits > 1) {  // one tile per cluster; its ring is free now in all blocks
      ClusterBarrier();
      consumer.Send(rank);
      ClusterBarrier();
      consumer.ReceiveAndStore(rank, TileAt<C>(a, first));
    }
  }
}

}  // namespace nmsparse::cuda::sddmm

#endif  // JAX_NMSPARSE_CUDA_SDDMM_WGMMA_CUH_
