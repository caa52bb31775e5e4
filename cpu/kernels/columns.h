// From the format to flat lists, and between token-major arrays and feature-major tiles.
//
// The kernels for several tokens keep tokens in the lanes of a vector. Activations are first copied into tiles
//   [tile][feature][width]      width = a few vectors of tokens, as accumulator type, zeros beyond the edges
// so that one kept weight is a broadcast times one row of a tile. For a column and a few windows, a Packer writes two
// flat lists of the same length: where the row of x of each kept weight starts in the tile, and the weight's value.
// Patterns, block shapes, window sizes, dtypes and corrupt masks end here; no kernel behind it knows of them.
#ifndef JAX_NMSPARSE_CPU_KERNELS_COLUMNS_H_
#define JAX_NMSPARSE_CPU_KERNELS_COLUMNS_H_

#include "cpu/kernels/simd.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

// What Positions writes at most, rounded up to whole vectors.
constexpr int kPositionBytes = 256;

// The positions of the q kept units of a window, ascending. Bits beyond the window count as unset, set bits beyond the
// q-th are ignored, and where bits run out the position is the window's last unit: always inside the window.
inline void Positions(const uint32_t* words, const Geometry& geometry, uint8_t* positions) {
  const int units = geometry.window_units;
#if defined(__AVX512VBMI2__)
  alignas(64) static constexpr uint8_t kIota[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                    32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                    48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
  if (units <= 32) {
    const __m256i iota = _mm256_load_si256(reinterpret_cast<const __m256i*>(kIota));
    const __m256i last = _mm256_set1_epi8(static_cast<char>(units - 1));
    const __m256i kept = _mm256_mask_compress_epi8(last, _bzhi_u32(words[0], units), iota);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions), kept);
    return;
  }
  const __m512i iota = _mm512_load_si512(kIota);
  const __m512i last = _mm512_set1_epi8(static_cast<char>(units - 1));
  for (int first = 0, count = 0; first < units; first += 64) {
    uint64_t bits = words[first / 32];
    if (first / 32 + 1 < geometry.mask_words) bits |= static_cast<uint64_t>(words[first / 32 + 1]) << 32;
    bits = _bzhi_u64(bits, Min(units - first, 64));
    const __m512i kept = _mm512_add_epi8(iota, _mm512_set1_epi8(static_cast<char>(first)));
    _mm512_storeu_si512(positions + count, _mm512_mask_compress_epi8(last, bits, kept));
    count += __builtin_popcountll(bits);
    if (first + 64 >= units) {
      for (; count < geometry.q; ++count) positions[count] = static_cast<uint8_t>(units - 1);
    }
  }
#else
  int count = 0;
  for (int v = 0; v < geometry.mask_words && count < geometry.q; ++v) {
    uint32_t bits = words[v];
    if (units - 32 * v < 32) bits &= (1u << (units - 32 * v)) - 1;
    for (; bits != 0 && count < geometry.q; bits &= bits - 1) {
      positions[count++] = static_cast<uint8_t>(32 * v + __builtin_ctz(bits));
    }
  }
  for (; count < geometry.q; ++count) positions[count] = static_cast<uint8_t>(units - 1);
#endif
}

// Element-wise weights with one mask word per window: the word with exactly q bits, all inside the window. Of a corrupt
// word the extra highest bits are dropped, or the highest units that it lacks are added.
inline __attribute__((noinline)) uint32_t RepairBits(uint32_t bits, int units, int q) {
  int extra = __builtin_popcount(bits) - q;
  for (int u = units - 1; u >= 0 && extra != 0; --u) {
    const uint32_t bit = 1u << u;
    if (extra > 0 && (bits & bit)) bits ^= bit, --extra;
    if (extra < 0 && !(bits & bit)) bits ^= bit, ++extra;
  }
  return bits;
}

NMS_INLINE uint32_t KeptBits(uint32_t word, uint32_t window_mask, int units, int q) {
  word &= window_mask;
  return __builtin_expect(__builtin_popcount(word) == q, 1) ? word : RepairBits(word, units, q);
}

inline bool IsElementwise(const Geometry& geometry) {
  return geometry.bk == 1 && geometry.bn == 1 && geometry.mask_words == 1;
}

inline uint32_t WindowMask(const Geometry& geometry) {
  return geometry.window_units >= 32 ? ~0u : (1u << geometry.window_units) - 1;
}

// A few consecutive windows of a weight of element type V, read as Acc.
template <typename Acc, typename V>
class Packer {
 public:
  // Lists need room for this many entries more than their length.
  static constexpr int kSlack = 64;

  // `row_step`: elements from one row of the tile to the next.
  Packer(const Geometry& geometry, const V* values, const uint32_t* mask, int32_t row_step)
      : geometry_(geometry), values_(values), mask_(mask), row_step_(row_step) {}

  void SetWindows(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
  }

  int64_t length() const { return count_ * geometry_.q * geometry_.bk; }

  // For all columns of a block; relative to the first window's first row.
  void Offsets(int64_t block, uint32_t* offsets) const {
    const int q = geometry_.q, bk = geometry_.bk;
    const uint32_t unit_step = static_cast<uint32_t>(row_step_ * bk);
    alignas(64) uint8_t positions[kPositionBytes];
    for (int64_t w = 0; w < count_; ++w) {
      Positions(mask_ + ((first_ + w) * geometry_.out_blocks + block) * geometry_.mask_words, geometry_, positions);
      const uint32_t base = static_cast<uint32_t>(w * geometry_.window_units) * unit_step;
      if (bk == 1) {
        for (int j = 0; j < q; j += 16) {
#pragma GCC unroll 16
          for (int l = 0; l < 16; ++l) offsets[j + l] = base + positions[j + l] * unit_step;
        }
        offsets += q;
      } else {
        for (int j = 0; j < q; ++j) {
          for (int r = 0; r < bk; ++r)
            *offsets++ = base + positions[j] * unit_step + static_cast<uint32_t>(r * row_step_);
        }
      }
    }
  }

  void Values(int64_t column, Acc* out) const {
    const int64_t rows = int64_t{geometry_.q} * geometry_.bk, bn = geometry_.bn;
    const int64_t block = column / bn;
    for (int64_t w = 0; w < count_; ++w, out += rows) {
      const V* in = values_ + ((first_ + w) * geometry_.out_blocks + block) * rows * bn + column % bn;
      if (bn == 1) {
        for (int64_t i = 0; i < rows; i += kLanes<Acc>) Store(out + i, LoadFirst<Acc>(in + i, rows - i));
      } else {
        for (int64_t i = 0; i < rows; ++i) out[i] = ToAcc<Acc>(in[i * bn]);
      }
    }
  }

 private:
  const Geometry& geometry_;
  const V* values_;
  const uint32_t* mask_;
  int32_t row_step_;
  int64_t first_ = 0, count_ = 0;
};

// Copies features [first, last) of up to `width` tokens into a tile: in [token][features] -> tile [feature][width].
// `tile` points to feature 0; features beyond `features` and tokens beyond `tokens` become zero.
template <typename Acc, typename T>
void FillTile(const T* in, int64_t features, int64_t tokens, int64_t first, int64_t last, int width, Acc* tile) {
  constexpr int lanes = kLanes<Acc>;
  for (int64_t f = first; f < last; f += lanes) {
    for (int t = 0; t < width; t += lanes) {
      Vec<Acc> rows[lanes];
      for (int i = 0; i < lanes; ++i) {
        rows[i] =
            t + i < tokens && f < features ? LoadFirst<Acc>(in + (t + i) * features + f, features - f) : Vec<Acc>{};
      }
      Transpose<Acc>(rows);
      for (int i = 0; i < lanes && f + i < last; ++i) Store(tile + (f + i) * width + t, rows[i]);
    }
  }
}

// FillTile for an operand whose dtype is known when the call runs.
template <typename Acc>
void FillTile(const Operand& in, int64_t offset, int64_t features, int64_t tokens, int64_t first, int64_t last,
              int width, Acc* tile) {
  switch (in.dtype) {
    case DType::kF32:
      return FillTile(static_cast<const float*>(in.data) + offset, features, tokens, first, last, width, tile);
    case DType::kF64:
      return FillTile(static_cast<const double*>(in.data) + offset, features, tokens, first, last, width, tile);
    case DType::kBF16:
      return FillTile(static_cast<const BF16*>(in.data) + offset, features, tokens, first, last, width, tile);
    case DType::kF16:
      return FillTile(static_cast<const F16*>(in.data) + offset, features, tokens, first, last, width, tile);
    case DType::kS8:
      return FillTile(static_cast<const int8_t*>(in.data) + offset, features, tokens, first, last, width, tile);
    default:
      return;
  }
}

}  // namespace
}  // namespace NMS_ISA
}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_KERNELS_COLUMNS_H_
