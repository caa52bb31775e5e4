// Many tokens times transposed weights on Hopper's tensor cores as the dense product, from compact values: vector-wise
// weights of high density and element-wise ones, feature-major:
//
//   dxᵀ[i, t] = sum_c W[i, c] gᵀ[c, t]        c: all columns
//
// Rows of windows are the M operand, in registers: vector-wise, each lane that loads a part of them (ldmatrix takes the
// address of every row) reads the values of its row where the mask keeps it, a line of zeros where not; element-wise,
// each lane picks its elements by the masks of its columns. Tokens of gᵀ are the N operand (MN-major); g [batch,
// out_features, tokens] and dx [batch, in_features, tokens] are contiguous along tokens.
//
// Absent weights times NaN or infinity would be NaN. All other results are right, so elements that are NaN at the end
// are summed again from the kept weights alone.
//
// Stage. 64 columns: their weights of four windows (spmm_t_expand_weights.cuh), 64 lines of gᵀ for every 64 tokens.
// Ownership. A block (one per multiprocessor, persistent) owns four windows (up to 128 rows) x 256 tokens at a time,
//   each of its two consumer warpgroups two windows. Producer warp 0 copies.
// Shared memory (bytes): ring of slots x (32768 + weights rounded up to 1024), g first; 8 x 1280 for results on their
//   way out; 128 zeros; 2 x 8 x 8 barriers.
// Synchronisation. full[slot]: bytes have landed. empty[slot]: the eight consumer warps are done with it.
#ifndef JAX_NMSPARSE_CUDA_SPMM_T_EXPAND_CUH_
#define JAX_NMSPARSE_CUDA_SPMM_T_EXPAND_CUH_

#include "cuda/spmm_t_expand_weights.cuh"

namespace nmsparse::cuda::spmm_t_expand {

// One thread: copies.
template <template <class> class Weights, class T>
__device__ void Copy(const Arguments& a, const SharedMap& shared) {
  RingPosition at;
  for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
    const Tile tile = TileAt(a, index);
    for (int step = 0; step < a.steps; ++step, at.Advance(a.slots)) {
      const uint32_t full = shared.Full(at.slot);
      BarrierWait(shared.Empty(at.slot), at.parity ^ 1);
      BarrierArriveExpect(full, kTokenChunks * kChunkBytes + Weights<T>::CopiedBytes(a, tile, step));
      Weights<T>::Copy(a, shared.Weights(at.slot), full, tile, step);
#pragma unroll
      for (int i = 0; i < kTokenChunks; ++i) {
        LoadBox(shared.Tokens(at.slot) + i * kChunkBytes, &a.g, full, tile.token + i * kChunk, step * kChunk,
                tile.batch);
      }
    }
  }
}

template <template <class> class Weights, class T>
class Consumer {
 public:
  __device__ Consumer(const Arguments& a, const SharedMap& shared, int consumer)
      : a_(a),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        window_(consumer * 2 + threadIdx.x / (2 * kWarpSize) % 2),
        first_unit_(threadIdx.x / kWarpSize % 2 * 16),
        store_(shared.Store(threadIdx.x / kWarpSize)) {}

  __device__ void Run(const Tile& tile) {
    const Geometry& g = a_.geometry;
    Weights<T> weights(a_, tile, window_, first_unit_, shared_.Zeros());
    float d[kTokens / 2];
    Reduce(weights, d);
    bool poisoned = false;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) poisoned |= d[i] != d[i];
    const auto row_of = [&](int row) { return RowOf(tile, first_unit_ + row); };
    StoreFeatureRows<kTokens>(a_.result, tile.batch * g.in_features, g.tokens, tile.token, store_, d, row_of);
    if (__any_sync(~0u, poisoned)) SumAgain(tile, weights);
  }

 private:
  // The row of a unit of this warp's window, or -1.
  __device__ int64_t RowOf(const Tile& tile, int unit) const {
    const Geometry& g = a_.geometry;
    const int64_t window = tile.window + window_, row = window * g.window_units + unit;
    return unit < g.window_units && window < g.windows && row < g.in_features ? row : -1;
  }

  __device__ void Release(int slot) {
    __syncwarp();
    if (lane_ == 0) BarrierArrive(shared_.Empty(slot));
  }

  __device__ void Reduce(Weights<T>& weights, float (&d)[kTokens / 2]) {
    Fragments even, odd;
    int pending = -1, step = 0;
    for (; step + 1 < a_.steps; step += 2) {
      Stage(weights, step, even, d, pending);
      Stage(weights, step + 1, odd, d, pending);
    }
    if (step < a_.steps) Stage(weights, step, even, d, pending);
    MmaWait<0>();
    Release(pending);
  }

  // The products of one stage; those of the stage before are done when it returns.
  __device__ __forceinline__ void Stage(Weights<T>& weights, int step, Fragments& fragments, float (&d)[kTokens / 2],
                                        int& pending) {
    BarrierWait(shared_.Full(at_.slot), at_.parity);
    weights.Load(shared_.Weights(at_.slot), step, fragments);
    const uint64_t tokens = MmaDescriptor(shared_.Tokens(at_.slot), kChunkBytes);
    MmaFence();
#pragma unroll
    for (int depth = 0; depth < kChunk / kMmaDepth; ++depth) {
      MmaRegisters<T, kTokens, Major::kMN>(d, fragments[depth], tokens + depth * kDepthAdvance<Major::kMN>,
                                           step + depth);
    }
    MmaCommit();
    MmaWait<1>();
    if (pending >= 0) Release(pending);
    pending = at_.slot;
    at_.Advance(a_.slots);
  }

  // Results of this warp that are NaN, from the kept weights alone.
  __device__ __noinline__ void SumAgain(const Tile& tile, const Weights<T>& weights) const {
    const Geometry& g = a_.geometry;
    __syncwarp();
    for (int unit = first_unit_; unit < first_unit_ + 16; ++unit) {
      const int64_t row = RowOf(tile, unit);
      if (row < 0) break;
      for (int64_t token = tile.token + lane_; token < min(g.tokens, int64_t{tile.token} + kTokens);
           token += kWarpSize) {
        const int64_t place = (tile.batch * g.in_features + row) * g.tokens + token;
        if (!IsNaN(place)) continue;
        const T* const y = static_cast<const T*>(a_.g_data) + tile.batch * g.out_features * g.tokens + token;
        float sum = 0.0f, weight;
        for (int64_t column = 0; column < g.out_features; ++column) {
          if (weights.Find(unit, column, &weight)) sum = fmaf(weight, ToFloat(y[column * g.tokens]), sum);
        }
        StoreResult(a_.result, place, sum);
      }
    }
  }
  __device__ bool IsNaN(int64_t place) const {
    bool nan = false;
    WithOutputType(a_.result.dtype, [&](auto zero) {
      const float v = ToFloat(static_cast<const decltype(zero)*>(a_.result.data)[place]);
      nan = v != v;
    });
    return nan;
  }

  const Arguments& a_;
  const SharedMap shared_;
  const int lane_;
  const int window_, first_unit_;  // of the tile's windows, and first of its units: this warp's rows
  const uint32_t store_;
  RingPosition at_;
};

template <template <class> class Weights, class T>
__global__ void __launch_bounds__(kThreads, 1) ManyTokensExpanded(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const SharedMap shared{SharedAddress(storage), a.slots, a.stage_bytes};
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      BarrierInit(shared.Full(slot), 1);
      BarrierInit(shared.Empty(slot), kConsumers * 4);
    }
    BarrierInitFence();
  }
  if (threadIdx.x < kLineBytes / 4) {
    *reinterpret_cast<uint32_t*>(storage + (shared.Zeros() - shared.base) + threadIdx.x * 4) = 0;
  }
  __syncthreads();

  if (warpgroup >= kConsumers) {
    ReleaseRegisters<kProducerRegisters>();
    if (threadIdx.x / kWarpSize % 4 == 0 && ElectOne()) Copy<Weights, T>(a, shared);
  } else {
    ClaimRegisters<kConsumerRegisters>();
    Consumer<Weights, T> consumer(a, shared, warpgroup);
    for (int32_t index = blockIdx.x; index < a.tiles; index += gridDim.x) consumer.Run(TileAt(a, index));
  }
}

}  // namespace nmsparse::cuda::spmm_t_expand

#endif  // JAX_NMSPARSE_CUDA_SPMM_T_EXPAND_CUH_
