// Staging for the element-wise tensor-core kernels: a ring of weight groups per warp, and chunks of x per block.
#ifndef JAX_NMSPARSE_CUDA_EW_RING_CUH_
#define JAX_NMSPARSE_CUDA_EW_RING_CUH_

#include "cuda/ew_kept.cuh"

namespace nmsparse::cuda::ew {

inline constexpr int kGroupWindows = 4;  // windows of a group: one for each lane of a quad
inline constexpr int kPieceBytes = 16;
inline constexpr int kPieceRows = 8;  // rows of x in a piece

// A stage holds kGroupWindows windows of the warp's columns (16 or 32): the values of each window as one run, then the
// mask words of each window. Between the two lie kGapBytes that nothing writes here, for readers that run past a
// column. A warp fills and reads its own ring.
template <class Value_, int kQ_, int kWarpColumns_, int kStages_, int kGapBytes_>
struct WeightRing {
  using Value = Value_;
  static constexpr int kStages = kStages_, kWarpColumns = kWarpColumns_;
  static constexpr int kColumnBytes = kQ_ * static_cast<int>(sizeof(Value));
  static constexpr int kRunBytes = kWarpColumns * kColumnBytes;
  static constexpr int kGapBytes = kGapBytes_, kGapOffset = kGroupWindows * kRunBytes;
  static constexpr int kMaskStride = kWarpColumns * 4 + 32;
  static constexpr int kMaskPieces = kWarpColumns * 4 / kPieceBytes;
  static constexpr int kMaskOffset = kGapOffset + kGapBytes;
  static constexpr int kStageBytes = kMaskOffset + kGroupWindows * kMaskStride;
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(kStageBytes % 16 == 0 && kRunBytes % 16 == 0, "stages and windows begin at 16-byte boundaries");

  const char* values;  // of the warp's first column in window `window`
  const uint32_t* mask;
  int64_t out;           // columns per window in memory
  uint32_t base;         // of the warp's ring in shared memory
  int32_t window, last;  // the next window to ask for; the block's last + 1
  int32_t columns;       // the warp's columns inside out_features
  int32_t copy_bytes;    // what both the runs and the mask rows are aligned to: 16, 8, 4, or less: by elements
  int32_t slot;

  __device__ __forceinline__ void Begin(const Problem& problem, int64_t batch, int64_t column, int first, int end,
                                        char* shared) {
    const Geometry& geometry = problem.geometry;
    out = geometry.out_features;
    columns = static_cast<int32_t>(max(int64_t{0}, min(int64_t{kWarpColumns}, out - column)));
    const int64_t origin = (batch * geometry.windows + first) * out + min(column, out - 1);
    values = static_cast<const char*>(problem.values.data) + origin * kColumnBytes;
    mask = problem.mask + origin;
    const int64_t row = out * kColumnBytes | out * 4;
    copy_bytes = static_cast<int32_t>(row & -row);
    base = SharedAddress(shared);
    window = first, last = end, slot = 0;
  }

  // Asks for the next group. `swizzle(window of the group, column)` is xored to the piece's number. Windows from `last`
  // on and columns beyond out_features are zeros: no kept value, no position.
  template <class Swizzle>
  __device__ __forceinline__ void Fill(int lane, const Swizzle& swizzle) {
    if (window < last) {
      const uint32_t stage = base + slot * kStageBytes;
      if (copy_bytes >= 16 && columns == kWarpColumns && window + kGroupWindows <= last) {
        constexpr int kRunPieces = kRunBytes / kPieceBytes;
        constexpr int kPieces = kGroupWindows * kRunPieces;
#pragma unroll
        for (int i = 0; i < kPieces; i += kWarpSize) {
          const int flat = i + lane;
          const int w = kRunPieces % kWarpSize == 0 ? i / kRunPieces : flat / kRunPieces;
          const int piece = flat - w * kRunPieces;
          if (kPieces % kWarpSize == 0 || flat < kPieces) {
            const int place = piece ^ swizzle(w, piece * kPieceBytes / kColumnBytes);
            CopyAsync<16>(stage + w * kRunBytes + place * kPieceBytes,
                          values + w * out * kColumnBytes + piece * kPieceBytes);
          }
        }
        const int w = lane / kMaskPieces, piece = lane % kMaskPieces;
        if (w < kGroupWindows) {
          CopyAsync<16>(stage + kMaskOffset + w * kMaskStride + piece * kPieceBytes, mask + w * out + piece * 4);
        }
      } else {
        FillAny<Swizzle>(values, mask, out, last - window, columns, lane, stage);
      }
      values += kGroupWindows * out * kColumnBytes;
      mask += kGroupWindows * out;
    }
    window += kGroupWindows;
    slot = slot + 1 == kStages ? 0 : slot + 1;
    CommitCopies();
  }

 private:
  // Plain copies of the first `windows` windows and `columns` columns; zeros for the rest.
  template <class Swizzle>
  static __device__ __noinline__ void FillAny(const char* values, const uint32_t* mask, int64_t out, int windows,
                                              int columns, int lane, uint32_t stage) {
    const Swizzle swizzle{};
    char* to = static_cast<char*>(__cvta_shared_to_generic(stage));
#pragma unroll 1
    for (int w = 0; w < kGroupWindows; ++w, values += out * kColumnBytes, mask += out, to += kRunBytes) {
#pragma unroll 1
      for (int i = lane; i < kRunBytes / static_cast<int>(sizeof(Value)); i += kWarpSize) {
        const int offset = i * static_cast<int>(sizeof(Value));
        const int place =
            (offset / kPieceBytes ^ swizzle(w, offset / kColumnBytes)) * kPieceBytes + offset % kPieceBytes;
        Value value;
        memset(&value, 0, sizeof(Value));
        if (w < windows && offset < columns * kColumnBytes) value = *reinterpret_cast<const Value*>(values + offset);
        *reinterpret_cast<Value*>(to + place) = value;
      }
      char* words = static_cast<char*>(__cvta_shared_to_generic(stage)) + kMaskOffset + w * kMaskStride;
      if (lane < kWarpColumns)
        reinterpret_cast<uint32_t*>(words)[lane] = w < windows && lane < columns ? mask[lane] : 0u;
    }
  }
};

// x in shared memory: two chunks [token][kRows rows], tokens kPitch bytes apart, each row of the chunk in its place.
template <class X_, int kTokens_, int kWindows_, int kThreads_, int kPad>
struct XChunks {
  using X = X_;
  static constexpr int kTokens = kTokens_, kWindows = kWindows_, kThreads = kThreads_;
  static constexpr int kRows = kWindows * kWindow;
  static constexpr int kPitch = kRows * 2 + kPad;
  static constexpr int kChunkBytes = kTokens * kPitch;
  static constexpr int kPieces = kRows / kPieceRows;
  static_assert(sizeof(X) == 2 && kRows * 2 % 128 == 0, "the pad alone shifts the banks between tokens");
  static_assert(kPieces % kThreads == 0 || kThreads % kPieces == 0, "a thread copies one column of pieces");

  // Asks for rows [32 * window, ...) of every token. Rows beyond in_features and tokens beyond the last are zeros.
  static __device__ __forceinline__ void Fill(const Problem& problem, int64_t batch, int64_t window, char* chunk) {
    const Geometry& geometry = problem.geometry;
    const int64_t depth = geometry.in_features;
    const X* x = static_cast<const X*>(problem.x.data) + batch * geometry.tokens * depth;
    const int tokens = static_cast<int>(min(int64_t{kTokens}, geometry.tokens));
    if (depth % kPieceRows != 0 || reinterpret_cast<uintptr_t>(x) % kPieceBytes != 0) {
      FillAny(x, depth, tokens, window * kWindow, chunk);
      return;
    }
    constexpr int kColumnsAtOnce = kPieces < kThreads ? kPieces : kThreads;
    constexpr int kTokensAtOnce = kThreads / kColumnsAtOnce;
#pragma unroll
    for (int first = 0; first < kPieces; first += kColumnsAtOnce) {
      const int piece = first + threadIdx.x % kColumnsAtOnce, token = threadIdx.x / kColumnsAtOnce;
      const int64_t row = window * kWindow + piece * kPieceRows;
      const bool inside = row < depth;
      const X* from = x + token * depth + row;
      uint32_t to = SharedAddress(chunk) + token * kPitch + piece * kPieceBytes;
#pragma unroll
      for (int i = 0; i < kTokens; i += kTokensAtOnce) {
        if (kTokens % kTokensAtOnce == 0 || token + i < kTokens) {
          const bool valid = inside && token + i < tokens;
          CopyAsync<16>(to + i * kPitch, valid ? from : x, valid);
        }
        from += kTokensAtOnce * depth;
      }
    }
  }

 private:
  static __device__ __noinline__ void FillAny(const X* x, int64_t depth, int tokens, int64_t row0, char* chunk) {
    for (int i = threadIdx.x; i < kTokens * kRows; i += kThreads) {
      const int token = i / kRows, k = i % kRows;
      X value = To<X>(0.0f);
      if (token < tokens && row0 + k < depth) value = x[token * depth + row0 + k];
      *reinterpret_cast<X*>(chunk + token * kPitch + k * 2) = value;
    }
  }
};

// What the kernels have in common that take both from here: a warp owns two m16 tiles of columns and a ring for them, a
// block walks over chunks of x. kGap: WeightRing. kPad: XChunks.
template <class X_, int kQ_, int kTokens_, int kWarps_, int kStages, int kMinBlocks_, int kGap, int kPad>
struct RingConfig {
  using X = X_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarpSize * kWarps;
  static constexpr int kTiles = 2;  // m16 tiles of a warp
  static constexpr int kWarpColumns = 16 * kTiles;
  static constexpr int kColumns = kWarpColumns * kWarps;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kChunkWindows = kTokens <= 16 ? 128 / kTokens : 8;
  using Ring = WeightRing<X, kQ, kWarpColumns, kStages, kGap>;
  using Chunks = XChunks<X, kTokens, kChunkWindows, kThreads, kPad>;
  static constexpr int kPoolBytes = Ring::kBytes * kWarps + 2 * Chunks::kChunkBytes;
  static constexpr int kPartialBytes = kTokens * kColumns * 4;
  static constexpr int kSharedBytes = kPoolBytes > kPartialBytes ? kPoolBytes : kPartialBytes;
  static_assert(sizeof(X) == 2, "a word holds a pair of values");
  static_assert(kChunkWindows / kGroupWindows >= kStages - 1, "x of the next chunk is waited for with the weights");
};

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_RING_CUH_
