// What the feature-major kernels on Hopper share: the order of their tiles, and the way of a tile of results from
// accumulators to y [batch, out_features, tokens]: epilogue, rounding, shared memory, copy engine.
#ifndef JAX_NMSPARSE_CUDA_FEATURE_MAJOR_CUH_
#define JAX_NMSPARSE_CUDA_FEATURE_MAJOR_CUH_

#include "common/problem.h"
#include "cuda/device.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace nmsparse::cuda {

// First column and token of a tile.
struct Tile {
  int32_t batch, out, token;
};

// Groups of `token_group` token tiles walk all column tiles together, so that their x stays in the L2 cache.
struct TileOrder {
  int32_t token_group;
  int32_t token_tiles;
  int32_t out_tiles;
  int32_t tiles;

  template <int kOut, int kTokens>
  __device__ __forceinline__ Tile At(int32_t index) const {
    const int32_t per_batch = token_tiles * out_tiles;
    const int32_t batch = index / per_batch;
    const int32_t in_batch = index % per_batch;
    const int32_t per_group = token_group * out_tiles;
    const int32_t first = in_batch / per_group * token_group;
    const int32_t group = min(token_group, token_tiles - first);
    const int32_t in_group = in_batch % per_group;
    return {batch, in_group / group * kOut, (first + in_group % group) * kTokens};
  }
};

// False where there are more tiles than a grid has blocks.
inline bool OrderTiles(const Geometry& g, int out, int tokens, int token_group, TileOrder* order) {
  const int64_t token_tiles = CeilDiv(g.tokens, tokens), out_tiles = CeilDiv(g.out_features, out);
  if (g.batch * token_tiles * out_tiles > kMaxBlocks) return false;
  *order = {token_group, static_cast<int32_t>(token_tiles), static_cast<int32_t>(out_tiles),
            static_cast<int32_t>(g.batch * token_tiles * out_tiles)};
  return true;
}

// What happens to a tile after its products.
struct OutputArguments {
  CUtensorMap y;  // unused where the result is float32
  Geometry geometry;
  Epilogue epilogue;
  Result result;
};

// Scale and bias of one column of W.
__device__ __forceinline__ float2 ScaleAndBias(const OutputArguments& a, int batch, int out) {
  const Geometry& g = a.geometry;
  float2 result = make_float2(1.0f, 0.0f);
  if (out >= g.out_features) return result;
  const int64_t at = batch * g.out_features + out;
  if (a.epilogue.scales != nullptr) result.x = a.epilogue.scales[at];
  if (a.epilogue.bias.data != nullptr) result.y = LoadAsFloat(a.epilogue.bias, at);
  return result;
}

// A loop over groups of accumulators, so that the code of the activation is there 8 times and not 128: registers
// cannot be indexed, hence the unrolled selections.
template <int kValues>
__device__ __forceinline__ void ApplyActivation(Activation activation, float (&d)[kValues]) {
  constexpr int kGroup = 8;
#pragma unroll 1
  for (int group = 0; group < kValues / kGroup; ++group) {
    float v[kGroup];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i / kGroup == group) v[i % kGroup] = d[i];
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = Activate(activation, v[i]);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i / kGroup == group) d[i] = v[i % kGroup];
    }
  }
}

// Scale, bias and activation of a thread's accumulators, whose columns are `out` and `out` + 8.
template <int kValues>
__device__ __forceinline__ void ApplyEpilogue(const OutputArguments& a, float (&d)[kValues], int batch, int out) {
  if (a.epilogue.scales != nullptr || a.epilogue.bias.data != nullptr) {
    const float2 affine[2] = {ScaleAndBias(a, batch, out), ScaleAndBias(a, batch, out + 8)};
#pragma unroll
    for (int i = 0; i < kValues; ++i) d[i] = fmaf(d[i], affine[i / 2 % 2].x, affine[i / 2 % 2].y);
  }
  if (a.epilogue.activation != Activation::kNone) ApplyActivation(a.epilogue.activation, d);
}

// One consumer warpgroup's part of a tile: 64 columns x kTokens tokens, accumulators as wgmma.cuh states.
template <int kTokens, int kBuffers>
class TileOutput {
 public:
  static constexpr int kValues = kTokens / 2;  // accumulators of a thread
  static constexpr int kBufferBytes = kMmaRows * kLineBytes;
  static constexpr int kBytes = kBuffers * kBufferBytes;  // of shared memory, at a multiple of 1024

  // `barrier`: a named barrier of this warpgroup's own.
  __device__ TileOutput(const OutputArguments& a, uint32_t buffers, int barrier)
      : a_(a),
        buffers_(buffers),
        barrier_(barrier),
        warp_(threadIdx.x / kWarpSize % 4),
        lane_(threadIdx.x % kWarpSize),
        leader_(threadIdx.x % kWarpgroupSize == 0) {}

  // The accumulators are used up.
  __device__ void Send(float (&d)[kValues], int batch, int first_out, int first_token) {
    const int out = first_out + warp_ * 16 + lane_ / 4;
    ApplyEpilogue(a_, d, batch, out);
    if (a_.result.dtype == DType::kF32) {
      StoreFloats(d, batch, out, first_token + lane_ % 4 * 2);
    } else if (a_.result.dtype == DType::kF16) {
      StoreBoxes<__half2>(d, batch, first_out, first_token);
    } else {
      StoreBoxes<__nv_bfloat162>(d, batch, first_out, first_token);
    }
  }

  // Shared memory may be given up after this.
  __device__ void Finish() {
    if (leader_) StoreWaitRead<0>();
  }

 private:
  // A box of results passes through shared memory, one line of 64 tokens per column, swizzled: the eight rows that one
  // stmatrix phase writes fall into different banks. The buffers take turns.
  __device__ uint32_t AwaitBuffer() {
    const uint32_t buffer = buffers_ + turn_ * kBufferBytes;
    turn_ = (turn_ + 1) % kBuffers;
    if (leader_) StoreWaitRead<kBuffers - 1>();
    NamedBarrier(barrier_, kWarpgroupSize);
    return buffer;
  }
  __device__ void SendBuffer(uint32_t buffer, int token, int out, int batch) {
    ProxyFence();
    NamedBarrier(barrier_, kWarpgroupSize);
    if (leader_) {
      StoreBox(&a_.y, buffer, token, out, batch);
      StoreCommit();
    }
  }
  __device__ static uint32_t Swizzled(uint32_t buffer, int line, int piece) {
    return buffer + line * kLineBytes + (piece ^ line % 8) * 16;
  }
  template <class Pair>
  __device__ void StoreBoxes(const float (&d)[kValues], int batch, int out, int token) {
#pragma unroll
    for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
      const uint32_t buffer = AwaitBuffer();
#pragma unroll
      for (int pair = 0; pair < kChunk / 16; ++pair) {
        const float* v = d + chunk * 32 + pair * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         Swizzled(buffer, warp_ * 16 + lane_ % 16, pair * 2 + lane_ / 16)),
                     "r"(Bits(RoundPair<Pair>(v[0], v[1]))), "r"(Bits(RoundPair<Pair>(v[2], v[3]))),
                     "r"(Bits(RoundPair<Pair>(v[4], v[5]))), "r"(Bits(RoundPair<Pair>(v[6], v[7])))
                     : "memory");
      }
      SendBuffer(buffer, token + chunk * kChunk, out, batch);
    }
  }

  __device__ void StoreFloats(const float (&d)[kValues], int batch, int out, int first_token) {
    const Geometry& g = a_.geometry;
    float* y = static_cast<float*>(a_.result.data) + (batch * g.out_features + out) * g.tokens + first_token;
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const int half = i / 2 % 2, offset = i / 4 * 8;
      if (out + 8 * half < g.out_features && first_token + offset < g.tokens) {
        *reinterpret_cast<float2*>(y + 8 * half * g.tokens + offset) = make_float2(d[i], d[i + 1]);
      }
    }
  }

  const OutputArguments& a_;
  const uint32_t buffers_;
  const int barrier_, warp_, lane_;
  const bool leader_;
  int turn_ = 0;
};

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_FEATURE_MAJOR_CUH_
