// The consumer warpgroups of block_many_tokens.cuh: products, epilogue, results to memory.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CONSUMER_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CONSUMER_CUH_

#include "cuda/block_many_tokens_tiles.cuh"

namespace nmsparse::cuda::block {

// A warpgroup: accumulates its part d of the tile, 64 columns x kMmaTokens tokens, and sends it out.
template <class C>
class Consumer {
 public:
  static constexpr int kValues = C::kMmaTokens / 2;  // accumulators of a thread

  __device__ Consumer(const Arguments& a, const SharedMap<C>& shared, int consumer)
      : a_(a),
        shared_(shared),
        consumer_(consumer),
        warp_(threadIdx.x / kWarpSize % 4),
        lane_(threadIdx.x % kWarpSize),
        leader_(threadIdx.x % kWarpgroupSize == 0) {
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
                     "r"(Round<Pair>(v[0], v[1])), "r"(Round<Pair>(v[2], v[3])), "r"(Round<Pair>(v[4], v[5])),
                     "r"(Round<Pair>(v[6], v[7]))
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

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MANY_TOKENS_CONSUMER_CUH_
