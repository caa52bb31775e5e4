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
// Ownership. A block (one per multiprocessor, persistent) owns a tile of kOut columns x kTokens tokens at a time. Two
//   consumer warpgroups own 64 columns x kMmaTokens tokens of it each, in registers. The producer warpgroup copies the
//   weights (one thread of a warp, by turns) and gathers x by the units kept, which it lists from the mask words a
//   chunk of windows ahead. Tiles of at most 128 tokens may belong to a cluster of `splits` blocks, each of which takes
//   a run of the stages; split_output.cuh adds their sums.
// Shared memory (bytes): ring of slots x rows x 128 x (kOutChunks + kTokenChunks), weights first; results on their way
//   out, 2 x 2 x 8192, or SplitOutput::Bytes of partial sums; 2 x 320 x 4 lists of rows; 2 x 16 x 8 barriers, and 2 x 2
//   x 8 of partial sums.
// Synchronisation. full[slot]: weights and x of the slot have landed (bytes of the copy engine, and with lanes the
//   arrival of every producer thread's copies). empty[slot]: all eight consumer warps are done with it. Named barriers:
//   1 and 2, a consumer and its store buffers; 3, the producers and their two lists. Stores of y overlap the
//   next tile, whose first stages are loaded meanwhile. Blocks of a cluster start and end together.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CUH_

#include "cuda/block_many_tokens_consumer.cuh"
#include "cuda/block_many_tokens_producer.cuh"

namespace nmsparse::cuda::block {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) ManyTokens(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap<C> shared{SharedAddress(storage), a.rows, a.slots, a.output_bytes};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    constexpr int kArrivals = C::kGather == Gather::kBoxes ? 1 : 1 + kWarpgroupSize;
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), kArrivals);
      BarrierInit(shared.Empty(slot), C::kConsumers * 4);
    }
    for (int i = 0; a.splits > 1 && i < C::kConsumers * C::kOutputBarriers; ++i) {
      BarrierInit(shared.OutputBarriers(0) + i * 8, (a.splits - 1) * 4);
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
    lists[i] = C::kGather == Gather::kBoxes ? static_cast<uint32_t>(a.output.geometry.in_features) : C::kZero;
  }
  ProxyFence();
  __syncthreads();
  if (a.splits > 1) ClusterBarrier();

  const Share share(a);
  if (warpgroup >= C::kConsumers) {
    ReleaseRegisters<C::kProducerRegisters>();
    Producer<C>(a, shared, share, lists).Run();
  } else {
    ClaimRegisters<C::kConsumerRegisters>();
    Consumer<C> consumer(a, shared, share, warpgroup);
    for (int index = share.first_tile; index < a.order.tiles; index += share.tile_stride) {
      consumer.Run(TileAt<C>(a, index));
    }
    consumer.Finish();
  }
  if (a.splits > 1) ClusterBarrier();  // until then others may write here
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CUH_
