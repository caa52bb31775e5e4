// The consumer warpgroups of block_many_tokens.cuh: products; feature_major.cuh takes the results.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CONSUMER_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CONSUMER_CUH_

#include "cuda/block_many_tokens_tiles.cuh"

namespace nmsparse::cuda::block {

// A warpgroup: accumulates its part d of the tile, 64 columns x kMmaTokens tokens, and sends it out.
template <class C>
class Consumer {
 public:
  static constexpr int kValues = C::kMmaTokens / 2;  // accumulators of a thread

  __device__ Consumer(const Arguments& a, const SharedMap<C>& shared, const Share& share, int consumer)
      : a_(a),
        shared_(shared),
        steps_(share.steps),
        lane_(threadIdx.x % kWarpSize),
        output_(MakeOutput(a, shared, consumer)) {
    const int out_chunk = C::kOutChunks == 2 ? consumer : 0;
    out_offset_ = out_chunk * kChunk;
    token_offset_ = C::kOutChunks == 2 ? 0 : consumer * C::kMmaTokens;
    weights_offset_ = out_chunk * shared.ChunkBytes();
    inputs_offset_ = token_offset_ / kChunk * shared.ChunkBytes() + token_offset_ % kChunk * 2;
  }

  __device__ void Run(const Tile& tile) {
    float d[kValues];
    Reduce(d);
    output_.Send(d, tile.batch, tile.out + out_offset_, tile.token + token_offset_);
  }
  __device__ void Finish() { output_.Finish(); }

 private:
  __device__ static typename C::Output MakeOutput(const Arguments& a, const SharedMap<C>& shared, int consumer) {
    if constexpr (C::kSplits) {
      return {a.output, a.splits, shared.Output(), shared.OutputBarriers(consumer)};
    } else {
      return {a.output, shared.Output() + consumer * C::Output::kBytes, 1 + consumer};
    }
  }

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

  __device__ void Reduce(float (&d)[kValues]) {
    const int depths = a_.rows / kMmaDepth;
    int pending = -1;
    for (int step = 0; step < steps_; ++step, at_.Advance(a_.slots)) {
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

  const Arguments& a_;
  const SharedMap<C> shared_;
  const int steps_, lane_;
  uint32_t weights_offset_, inputs_offset_;
  int out_offset_, token_offset_;
  RingPosition at_;
  typename C::Output output_;
};

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CONSUMER_CUH_
