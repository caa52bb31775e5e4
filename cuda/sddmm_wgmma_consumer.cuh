// The consumer warpgroups of sddmm_wgmma.cuh: products, and their sum over the blocks of a cluster.
#ifndef JAX_NMSPARSE_CUDA_SDDMM_WGMMA_CONSUMER_CUH_
#define JAX_NMSPARSE_CUDA_SDDMM_WGMMA_CONSUMER_CUH_

#include "cuda/sddmm_wgmma_writers.cuh"

namespace nmsparse::cuda::sddmm {

template <class C>
class Consumer {
 public:
  using T = typename C::T;

  __device__ Consumer(const Arguments& a, const SharedMap<C>& shared, int consumer)
      : a_(a),
        shared_(shared),
        consumer_(consumer),
        lane_(threadIdx.x % kWarpSize),
        columns_(C::kColumns == 128 ? consumer * kMmaRows : 0),
        rows_(C::kColumns == 128 ? 0 : consumer * kMmaColumns),
        writer_(a, shared.Store(threadIdx.x / kWarpSize), columns_ + threadIdx.x / kWarpSize % 4 * 16, rows_) {}

  __device__ void Reduce(int steps) {
    int pending = -1;
    for (int step = 0; step < steps; ++step, at_.Advance(a_.slots)) {
      // A slot is given back when its products are done: they run while the next slot is awaited, or, where that has
      // not landed yet, end before.
      if (pending >= 0 && !__all_sync(~0u, BarrierTest(shared_.Full(at_.slot), at_.parity))) {
        MmaWait<0>();
        Release(pending);
        pending = -1;
      }
      BarrierWait(shared_.Full(at_.slot), at_.parity);
      if (C::kRowsOf == Rows::kKept) ProxyFence();  // cp.async wrote the rows
      uint64_t columns = MmaDescriptor(shared_.Columns(at_.slot) + columns_ * kLineBytes, kLineBytes);
      uint64_t rows = MmaDescriptor(shared_.Rows(at_.slot) + rows_ * kLineBytes, kLineBytes);
      MmaFence();
#pragma unroll
      for (int depth = 0; depth < kChunk / kMmaDepth; ++depth) {
        Mma<T, kMmaColumns, Major::kK, Major::kK>(d_, columns + depth * kDepthAdvance<Major::kK>,
                                                  rows + depth * kDepthAdvance<Major::kK>, step + depth);
      }
      MmaCommit();
      MmaWait<1>();
      if (pending >= 0) Release(pending);
      pending = at_.slot;
    }
    MmaWait<0>();
    Release(pending);
  }

  // Writes the tile.
  __device__ void Store(const Tile& tile) { writer_.Write(tile, 0, kMmaColumns, d_); }

  // The accumulators of all blocks of the cluster are added up in pieces, one per block: a consumer's where two blocks
  // share the steps, half of that where four do. Called by both consumers; the block passes cluster barriers around it.
  __device__ void Send(int rank) {
    if (a_.splits == 2) {
      if (consumer_ != rank) SendPiece<0, kAccumulators>(rank, consumer_);
    } else {
      if (consumer_ * 2 != rank) SendPiece<0, kAccumulators / 2>(rank, consumer_ * 2);
      if (consumer_ * 2 + 1 != rank) SendPiece<kAccumulators / 2, kAccumulators / 2>(rank, consumer_ * 2 + 1);
    }
  }
  __device__ void ReceiveAndStore(int rank, const Tile& tile) {
    if (a_.splits == 2) {
      if (consumer_ != rank) return;
      AddPieces<kAccumulators>(rank);
      writer_.Write(tile, 0, kMmaColumns, d_);
      return;
    }
    if (consumer_ != rank / 2) return;
    if (rank % 2 == 1) {  // the piece's accumulators first
#pragma unroll
      for (int i = 0; i < kAccumulators / 2; ++i) d_[i] = d_[i + kAccumulators / 2];
    }
    AddPieces<kAccumulators / 2>(rank);
    writer_.Write(tile, rank % 2 * kMmaColumns / 2, kMmaColumns / 2, d_);
  }

 private:
  __device__ void Release(int slot) {
    if (lane_ == 0) BarrierArrive(shared_.Empty(slot));
  }

  // Where block `from` leaves accumulators 4 i ... 4 i + 3 of this thread in the block that owns the piece.
  template <int kCount>
  __device__ uint32_t Buffer(int from, int i) const {
    return shared_.base + ((from * (kCount / 4) + i) * kWarpgroupSize + threadIdx.x % kWarpgroupSize) * 16;
  }
  template <int kFirst, int kCount>
  __device__ void SendPiece(int rank, int owner) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float* v = d_ + kFirst + i * 4;
      StoreElsewhere(Buffer<kCount>(rank, i), owner, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  template <int kCount>
  __device__ void AddPieces(int rank) {
#pragma unroll 1
    for (int from = 0; from < a_.splits; ++from) {
      if (from == rank) continue;
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        float* v = d_ + i * 4;
        const float4 add = LoadShared16<float4>(Buffer<kCount>(from, i));
        v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
      }
    }
  }

  const Arguments& a_;
  const SharedMap<C> shared_;
  const int consumer_, lane_;
  const int columns_, rows_;  // of this consumer in the tile
  const Writer<C> writer_;
  RingPosition at_;
  float d_[kAccumulators];
};

}  // namespace nmsparse::cuda::sddmm

#endif  // JAX_NMSPARSE_CUDA_SDDMM_WGMMA_CONSUMER_CUH_
