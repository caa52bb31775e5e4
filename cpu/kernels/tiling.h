// Activations in scratch memory, as accumulator type: in tiles for the kernels that keep tokens in lanes, in rows for
// those that keep columns there.
#ifndef JAX_NMSPARSE_CPU_KERNELS_TILING_H_
#define JAX_NMSPARSE_CPU_KERNELS_TILING_H_

#include <cstdlib>

#include "cpu/isa.h"
#include "cpu/kernels/columns.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

// Bytes of a tile's windows that stay in a 32 KiB first-level cache beside the lists.
constexpr int64_t kTileBytes = 20 << 10;
// Kept weights per column and step: bounds the lists.
constexpr int64_t kListLength = 512;
// Tokens that are copied into tiles at a time: bounds the scratch memory, whatever the batch.
constexpr int64_t kTokensAtOnce = 256;

// Memory that is aligned for vectors and freed with its owner; null where there is none to be had.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : data_(std::aligned_alloc(64, static_cast<size_t>(RoundUp(bytes < 64 ? 64 : bytes, 64)))) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  explicit operator bool() const { return data_ != nullptr; }
  char* bytes() const { return static_cast<char*>(data_); }

 private:
  void* data_;
};

// Windows that one step handles, for tiles whose rows have `row_bytes`.
inline int64_t WindowsPerStep(const Geometry& geometry, int64_t row_bytes) {
  const int64_t by_cache = kTileBytes / (geometry.rows_per_window() * row_bytes);
  const int64_t by_list = kListLength / (int64_t{geometry.q} * geometry.bk);
  return Max<int64_t>(1, Min(Min(by_cache, by_list), geometry.windows));
}

// Calls f(Acc{}, V{}) for the types of the activations and values; false where no kernel takes them.
template <typename F>
inline bool DispatchTypes(DType x, DType values, F&& f) {
  const bool x_is_float = x == DType::kF32 || x == DType::kBF16 || x == DType::kF16;
  if (x_is_float && values == DType::kS8) return f(float{}, int8_t{}), true;
  if (x != values) return false;
  switch (x) {
    case DType::kF32:
      return f(float{}, float{}), true;
    case DType::kBF16:
      return f(float{}, BF16{}), true;
    case DType::kF16:
      return f(float{}, F16{}), true;
    case DType::kF64:
      return f(double{}, double{}), true;
    case DType::kS8:
      return f(int32_t{}, int8_t{}), true;
    default:
      return false;
  }
}

// What is handled between two barriers: a few batch entries, and of each the same tokens. Bounds the scratch memory.
struct Round {
  int64_t first_entry, entries;
  int64_t first_token, tokens;
};

// Calls f(Round) until all tokens of all batch entries had their turn; stops at the first status that is not kOk.
template <typename F>
inline Status ForRounds(const Geometry& geometry, int width, F&& f) {
  if (geometry.tokens == 0) return Status::kOk;
  const int64_t tokens = Min(geometry.tokens, RoundUp(kTokensAtOnce, width));
  const int64_t entries = Max<int64_t>(1, kTokensAtOnce / RoundUp(tokens, width));
  for (int64_t b = 0; b < geometry.batch; b += entries) {
    for (int64_t t = 0; t < geometry.tokens; t += tokens) {
      const Status status = f(Round{b, Min(entries, geometry.batch - b), t, Min(tokens, geometry.tokens - t)});
      if (status != Status::kOk) return status;
    }
  }
  return Status::kOk;
}

// The tiles of a round: [entry][tile][rows][width].
template <typename Acc>
class Tiles {
 public:
  // `rows`: features rounded up to whole windows or blocks.
  Tiles(const Round& round, int64_t rows, int width)
      : round_(round),
        rows_(rows),
        width_(width),
        count_(CeilDiv(round.tokens, width)),
        scratch_(round.entries * count_ * rows * width * static_cast<int64_t>(sizeof(Acc))) {}

  explicit operator bool() const { return static_cast<bool>(scratch_); }

  // Per batch entry.
  int64_t count() const { return count_; }

  Acc* tile(int64_t entry, int64_t i) const {
    return reinterpret_cast<Acc*>(scratch_.bytes()) + (entry * count_ + i) * rows_ * width_;
  }

  // Tokens in tile i.
  int64_t tokens(int64_t i) const { return Min<int64_t>(width_, round_.tokens - i * width_); }

  // Row of the token-major array [batch, tokens] that tile i of an entry begins at.
  int64_t row(const Geometry& geometry, int64_t entry, int64_t i) const {
    return (round_.first_entry + entry) * geometry.tokens + round_.first_token + i * width_;
  }

  void Fill(const Geometry& geometry, const Operand& in, int64_t features, Parallel& parallel) {
    constexpr int64_t kPart = 512;
    const int64_t parts = CeilDiv(rows_, kPart);
    parallel.For(round_.entries * count_ * parts, [&](int64_t task, int) {
      const int64_t part = task % parts, i = task / parts % count_, entry = task / parts / count_;
      FillTile<Acc>(in, row(geometry, entry, i) * features, features, tokens(i), part * kPart,
                    Min((part + 1) * kPart, rows_), width_, tile(entry, i));
    });
  }

 private:
  Round round_;
  int64_t rows_;
  int width_;
  int64_t count_;
  Scratch scratch_;
};

// The tokens of a round, row by row: [entry][token][stride], zeros from `features` to the stride.
template <typename Acc>
class Rows {
 public:
  Rows(const Round& round, int64_t features, int64_t padded)
      : round_(round),
        features_(features),
        // An odd number of cache lines.
        stride_(RoundUp(padded + kLanes<Acc>, 128 / sizeof(Acc)) + 64 / static_cast<int64_t>(sizeof(Acc))),
        scratch_(round.entries * round.tokens * stride_ * static_cast<int64_t>(sizeof(Acc))) {}

  explicit operator bool() const { return static_cast<bool>(scratch_); }
  int64_t stride() const { return stride_; }
  Acc* row(int64_t entry, int64_t token) const {
    return reinterpret_cast<Acc*>(scratch_.bytes()) + (entry * round_.tokens + token) * stride_;
  }

  void Fill(const Geometry& geometry, const Operand& in, Parallel& parallel) {
    parallel.For(round_.entries * round_.tokens, [&](int64_t i, int) {
      const int64_t entry = i / round_.tokens, token = i % round_.tokens;
      const int64_t from = ((round_.first_entry + entry) * geometry.tokens + round_.first_token + token) * features_;
      switch (in.dtype) {
        case DType::kF32:
          return Copy(static_cast<const float*>(in.data) + from, row(entry, token));
        case DType::kF64:
          return Copy(static_cast<const double*>(in.data) + from, row(entry, token));
        case DType::kBF16:
          return Copy(static_cast<const BF16*>(in.data) + from, row(entry, token));
        case DType::kF16:
          return Copy(static_cast<const F16*>(in.data) + from, row(entry, token));
        case DType::kS8:
          return Copy(static_cast<const int8_t*>(in.data) + from, row(entry, token));
        default:
          return;
      }
    });
  }

 private:
  template <typename T>
  void Copy(const T* in, Acc* out) const {
    for (int64_t k = 0; k < stride_; k += kLanes<Acc>) {
      Store(out + k, k < features_ ? LoadFirst<Acc>(in + k, features_ - k) : Vec<Acc>{});
    }
  }

  Round round_;
  int64_t features_, stride_;
  Scratch scratch_;
};

}  // namespace
}  // namespace NMS_ISA
}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_KERNELS_TILING_H_
