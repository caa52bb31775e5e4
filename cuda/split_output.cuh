// The results of a tile whose reduction the blocks of a cluster share, feature-major: partial sums meet in the shared
// memory of the block that owns their tokens, are added there in the order of the blocks, and go straight to memory.
//
// Ownership. The kGroups groups of 8 tokens of a part (64 columns x kTokens tokens, accumulators as wgmma.cuh states)
//   are dealt to the blocks in runs: group g is block g * splits / kGroups's. Every thread holds the same elements in
//   every block, so threads exchange with their like alone.
// Shared memory, of both consumers: [other blocks][groups of a block][256 threads] x 16 bytes.
// Synchronisation, per consumer: received (every warp of the other blocks has written) and freed (every other block has
//   read what this one sent); the next tile's sums wait for the latter.
#ifndef JAX_NMSPARSE_CUDA_SPLIT_OUTPUT_CUH_
#define JAX_NMSPARSE_CUDA_SPLIT_OUTPUT_CUH_

#include "cuda/feature_major.cuh"

namespace nmsparse::cuda {

// One consumer warpgroup's part of a tile.
template <int kTokens>
class SplitOutput {
 public:
  static constexpr int kValues = kTokens / 2;  // accumulators of a thread
  static constexpr int kGroups = kTokens / 8;
  static constexpr int kThreads = 2 * kWarpgroupSize;

  // Shared memory of both consumers, at a multiple of 16.
  static constexpr int Bytes(int splits) { return (splits - 1) * GroupsOfBlock(splits) * kThreads * 16; }

  // `barriers`: received and freed.
  __device__ SplitOutput(const OutputArguments& a, int splits, uint32_t buffer, uint32_t barriers)
      : a_(a),
        splits_(splits),
        rank_(blockIdx.x % splits),
        buffer_(buffer + threadIdx.x * 16),
        received_(barriers),
        freed_(barriers + 8),
        warp_(threadIdx.x / kWarpSize % 4),
        lane_(threadIdx.x % kWarpSize) {}

  // The accumulators are used up.
  __device__ void Send(float (&d)[kValues], int batch, int first_out, int first_token) {
    if (splits_ > 1) {
      Exchange(d);
      turn_ ^= 1;
    }
    const int out = first_out + warp_ * 16 + lane_ / 4, token = first_token + lane_ % 4 * 2;
    ApplyEpilogue(a_, d, batch, out);
    if (a_.result.dtype == DType::kF32) {
      Store<float2>(d, batch, out, token);
    } else if (a_.result.dtype == DType::kF16) {
      Store<__half2>(d, batch, out, token);
    } else {
      Store<__nv_bfloat162>(d, batch, out, token);
    }
  }
  __device__ void Finish() {}

 private:
  __host__ __device__ static constexpr int GroupsOfBlock(int splits) { return (kGroups + splits - 1) / splits; }
  __device__ int Owner(int group) const { return group * splits_ / kGroups; }
  __device__ static uint32_t Offset(int splits, int sender, int owner, int group) {
    const int other = sender > owner ? sender - 1 : sender;
    const int first = (owner * kGroups + splits - 1) / splits;
    return (other * GroupsOfBlock(splits) + group - first) * (kThreads * 16);
  }

  __device__ void ArriveAtOthers(uint32_t barrier) {
    __syncwarp();
    if (lane_ < splits_ && lane_ != rank_) ClusterBarrierArrive(barrier, lane_);
  }

  // Leaves the sums of the groups that are this block's in d; its other groups are used up.
  __device__ void Exchange(float (&d)[kValues]) {
    ClusterBarrierWait(freed_, turn_ ^ 1);  // returns at once the first time
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int owner = Owner(group);
      if (owner == rank_) continue;
      StoreElsewhere(buffer_ + Offset(splits_, rank_, owner, group), owner,
                     make_float4(d[4 * group], d[4 * group + 1], d[4 * group + 2], d[4 * group + 3]));
    }
    ArriveAtOthers(received_);
    ClusterBarrierWait(received_, turn_);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (Owner(group) != rank_) continue;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int sender = 0; sender < splits_; ++sender) {
        const float4 part = sender == rank_
                                ? make_float4(d[4 * group], d[4 * group + 1], d[4 * group + 2], d[4 * group + 3])
                                : LoadShared16<float4>(buffer_ + Offset(splits_, sender, rank_, group));
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
      d[4 * group] = sum.x, d[4 * group + 1] = sum.y, d[4 * group + 2] = sum.z, d[4 * group + 3] = sum.w;
    }
    ArriveAtOthers(freed_);
  }

  // tokens is even, so that a pair is inside or outside.
  template <class Pair>
  __device__ void Store(const float (&d)[kValues], int batch, int out, int token) {
    const Geometry& g = a_.geometry;
    Pair* const y = static_cast<Pair*>(a_.result.data) + ((batch * g.out_features + out) * g.tokens + token) / 2;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (Owner(group) != rank_ || token + 8 * group >= g.tokens) continue;
      if (out < g.out_features) y[4 * group] = RoundPair<Pair>(d[4 * group], d[4 * group + 1]);
      if (out + 8 < g.out_features) y[4 * group + 4 * g.tokens] = RoundPair<Pair>(d[4 * group + 2], d[4 * group + 3]);
    }
  }

  const OutputArguments& a_;
  const int splits_, rank_;
  const uint32_t buffer_, received_, freed_;
  const int warp_, lane_;
  uint32_t turn_ = 0;
};

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_SPLIT_OUTPUT_CUH_
