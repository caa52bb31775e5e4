// y = act((x W) scales + bias), tokens in lanes.
//
// Tile xT [in_features][width], width = `vectors` vectors of tokens. For one column c of W,
//   yT[c][:] += v * xT[k][:]      over its kept weights (k, v)
// with yT[c] in registers over the windows of one step, whose rows of xT stay in the first-level cache. A task owns
// (batch entry, tile, chunk of columns) and keeps its yT in scratch memory (second-level cache) between steps. Every
// element of y is summed in the order of k, whoever computes it.
#include "cpu/kernels/column_lanes.h"
#include "cpu/kernels/epilogue.h"
#include "cpu/kernels/few_tokens.h"
#include "cpu/kernels/tiling.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

// Adds `group` columns' kept weights, `length` each, to yT. Several columns at once, so that enough independent sums
// hide the latency of the multiply-adds.
template <typename Acc, int vectors, int group>
NMS_INLINE void Accumulate(const Acc* x, const uint32_t* const* offsets, const Acc* const* values, int64_t length,
                           Acc* y) {
  constexpr int lanes = kLanes<Acc>;
  Vec<Acc> sum[group][vectors];
#pragma GCC unroll 8
  for (int c = 0; c < group; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[c][v] = Load(y + (c * vectors + v) * lanes);
  }
  for (int64_t i = 0; i < length; ++i) {
#pragma GCC unroll 8
    for (int c = 0; c < group; ++c) {
      const Vec<Acc> value = Splat(values[c][i]);
      const Acc* row = x + offsets[c][i];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[c][v] += value * Load(row + v * lanes);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < group; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) Store(y + (c * vectors + v) * lanes, sum[c][v]);
  }
}

// The same for an element-wise weight, its positions taken from the mask's bits as they are used: with one vector of
// tokens, lists would cost as much as the multiply-adds. mask[w * out_features + c], values[c][w * value_step + j].
template <typename Acc, int vectors, int group>
NMS_INLINE void AccumulateBits(const Geometry& geometry, const Acc* x, const uint32_t* mask, const Acc* const* values,
                               int64_t value_step, int64_t windows, Acc* y) {
  constexpr int lanes = kLanes<Acc>, width = vectors * lanes;
  const int q = geometry.q, units = geometry.window_units;
  const uint32_t window_mask = WindowMask(geometry);
  Vec<Acc> sum[group][vectors];
#pragma GCC unroll 8
  for (int c = 0; c < group; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[c][v] = Load(y + (c * vectors + v) * lanes);
  }
  for (int64_t w = 0; w < windows; ++w) {
    uint32_t bits[group];
    const Acc* value[group];
#pragma GCC unroll 8
    for (int c = 0; c < group; ++c) {
      bits[c] = KeptBits(mask[w * geometry.out_blocks + c], window_mask, units, q);
      value[c] = values[c] + w * value_step;
    }
    for (int j = 0; j < q; ++j) {
#pragma GCC unroll 8
      for (int c = 0; c < group; ++c) {
        const Acc* row = x + static_cast<uint32_t>(__builtin_ctz(bits[c])) * width;
        bits[c] &= bits[c] - 1;
        const Vec<Acc> splat = Splat(value[c][j]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sum[c][v] += splat * Load(row + v * lanes);
      }
    }
    x += units * width;
  }
#pragma GCC unroll 8
  for (int c = 0; c < group; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) Store(y + (c * vectors + v) * lanes, sum[c][v]);
  }
}

template <typename Acc, typename V, int vectors>
class TokenLanes {
 public:
  static constexpr int kWidth = vectors * kLanes<Acc>;
  static constexpr int kGroup = vectors >= 4 ? 2 : 4;
  // Columns whose lists exist at a time.
  static constexpr int kRun = 8;
  // yT of a chunk takes at most half of a second-level cache of 256 KiB.
  static constexpr int64_t kMaxColumns = (128 << 10) / (kWidth * sizeof(Acc));

  TokenLanes(const Problem& problem, Parallel& parallel) : problem_(problem), parallel_(parallel) {
    const Geometry& geometry = problem.geometry;
    step_ = WindowsPerStep(geometry, kWidth * sizeof(Acc));
    list_ = step_ * geometry.q * geometry.bk + Packer<Acc, V>::kSlack;
    // A multiple of the lanes, for the transpose at the end; about eight chunks even when the weight is narrow.
    columns_ = RoundUp(Min(Max<int64_t>(CeilDiv(geometry.out_features, 8), 32), kMaxColumns), kLanes<Acc>);
    y_bytes_ = columns_ * kWidth * sizeof(Acc);
    scratch_bytes_ = RoundUp(y_bytes_ + kRun * list_ * (sizeof(Acc) + sizeof(uint32_t)), 64);
  }

  Status Run() {
    return ForRounds(problem_.geometry, kWidth, [&](const Round& round) { return RunRound(round); });
  }

 private:
  Status RunRound(const Round& round) {
    const Geometry& geometry = problem_.geometry;
    Tiles<Acc> x(round, geometry.windows * geometry.rows_per_window(), kWidth);
    Scratch scratch(scratch_bytes_ * parallel_.workers());
    if (!x || !scratch) return Status::kNoMemory;
    x.Fill(geometry, problem_.x, geometry.in_features, parallel_);
    const int64_t chunks = CeilDiv(geometry.out_features, columns_);
    parallel_.For(round.entries * chunks * x.count(), [&](int64_t task, int worker) {
      const int64_t i = task % x.count(), chunk = task / x.count() % chunks, entry = task / x.count() / chunks;
      const int64_t first = chunk * columns_, last = Min(first + columns_, geometry.out_features);
      Chunk(round.first_entry + entry, x.tile(entry, i), first, last, scratch.bytes() + worker * scratch_bytes_);
      Finish(round.first_entry + entry, x.row(geometry, entry, i), x.tokens(i), first, last,
             reinterpret_cast<const Acc*>(scratch.bytes() + worker * scratch_bytes_));
    });
    return Status::kOk;
  }

  // yT of columns [first, last), left at the beginning of `scratch`.
  void Chunk(int64_t batch, const Acc* x, int64_t first, int64_t last, char* scratch) const {
    const Geometry& geometry = problem_.geometry;
    Acc* y = reinterpret_cast<Acc*>(scratch);
    Acc* value_lists = reinterpret_cast<Acc*>(scratch + y_bytes_);
    uint32_t* offset_lists = reinterpret_cast<uint32_t*>(value_lists + kRun * list_);
    Packer<Acc, V> packer(geometry, static_cast<const V*>(problem_.values.data) + batch * geometry.values_count(),
                          problem_.mask + batch * geometry.mask_count(), kWidth);
    std::memset(y, 0, static_cast<size_t>(y_bytes_));
    for (int64_t w = 0; w < geometry.windows; w += step_) {
      packer.SetWindows(w, Min(step_, geometry.windows - w));
      const Acc* rows = x + w * geometry.rows_per_window() * kWidth;
      if (IsElementwise(geometry)) {
        ElementColumns(batch, w, rows, first, last, y, value_lists);
        continue;
      }
      int64_t block = -1;
      for (int64_t c = first; c < last;) {
        const int count = last - c >= kGroup ? kGroup : 1;
        const uint32_t* offsets[kGroup];
        const Acc* values[kGroup];
        for (int i = 0; i < count; ++i) {
          // The columns of a block share its offsets. The list of the group before may still be read: alternate.
          values[i] = value_lists + i * list_;
          packer.Values(c + i, value_lists + i * list_);
          if (const int64_t b = (c + i) / geometry.bn; b != block) {
            block = b;
            packer.Offsets(b, offset_lists + b % kGroup * list_);
          }
          offsets[i] = offset_lists + block % kGroup * list_;
        }
        Acc* y_columns = y + (c - first) * kWidth;
        if (count == kGroup) {
          Accumulate<Acc, vectors, kGroup>(rows, offsets, values, packer.length(), y_columns);
        } else {
          Accumulate<Acc, vectors, 1>(rows, offsets, values, packer.length(), y_columns);
        }
        c += count;
      }
    }
  }

  void ElementColumns(int64_t batch, int64_t window, const Acc* rows, int64_t first, int64_t last, Acc* y,
                      Acc* lists) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t windows = Min(step_, geometry.windows - window);
    const uint32_t* mask = problem_.mask + batch * geometry.mask_count() + window * geometry.out_features;
    const V* values = static_cast<const V*>(problem_.values.data) + batch * geometry.values_count() +
                      window * geometry.out_features * geometry.q;
    for (int64_t run = first; run < last; run += kRun) {
      const int64_t end = Min(run + kRun, last);
      const Acc* run_values;
      int64_t value_step;
      if constexpr (std::is_same_v<Acc, V>) {
        run_values = values + run * geometry.q;
        value_step = geometry.out_features * geometry.q;
      } else {
        // Converted for a run of columns at once: in one window their values are contiguous.
        const int64_t count = (end - run) * geometry.q;
        for (int64_t w = 0; w < windows; ++w) {
          const V* in = values + (w * geometry.out_features + run) * geometry.q;
          Acc* out = lists + w * count;
          for (int64_t i = 0; i < count; i += kLanes<Acc>) Store(out + i, LoadFirst<Acc>(in + i, count - i));
        }
        run_values = lists;
        value_step = count;
      }
      for (int64_t c = run; c < end;) {
        const int count = end - c >= kGroup ? kGroup : 1;
        const Acc* column_values[kGroup];
        for (int i = 0; i < count; ++i) column_values[i] = run_values + (c - run + i) * geometry.q;
        Acc* y_columns = y + (c - first) * kWidth;
        if (count == kGroup) {
          AccumulateBits<Acc, vectors, kGroup>(geometry, rows, mask + c, column_values, value_step, windows, y_columns);
        } else {
          AccumulateBits<Acc, vectors, 1>(geometry, rows, mask + c, column_values, value_step, windows, y_columns);
        }
        c += count;
      }
    }
  }

  // yT -> y.
  void Finish(int64_t batch, int64_t row, int64_t tokens, int64_t first, int64_t last, const Acc* y) const {
    constexpr int lanes = kLanes<Acc>;
    for (int64_t c = first; c < last; c += lanes) {
      for (int64_t t = 0; t < tokens; t += lanes) {
        Vec<Acc> rows[lanes];
        for (int i = 0; i < lanes; ++i) rows[i] = Load(y + (c - first + i) * kWidth + t);
        Transpose<Acc>(rows);
        for (int64_t i = 0; i < lanes && t + i < tokens; ++i) {
          StoreColumns<Acc>(problem_, batch, row + t + i, c, rows[i], Min<int64_t>(lanes, last - c));
        }
      }
    }
  }

  const Problem& problem_;
  Parallel& parallel_;
  int64_t step_, list_, columns_, y_bytes_, scratch_bytes_;
};

}  // namespace

Status Spmm(const Problem& problem, Parallel& parallel) {
  if (!IsResult(problem.result.dtype)) return Status::kUnsupported;
  for (const auto special : {SpmmFewTokens, SpmmColumnLanes}) {
    if (const Status status = special(problem, parallel); status != Status::kUnsupported) return status;
  }
  Status status = Status::kOk;
  const bool known = DispatchTypes(problem.x.dtype, problem.values.dtype, [&](auto acc, auto value) {
    using Acc = decltype(acc);
    using V = decltype(value);
    const int64_t vectors = CeilDiv(problem.geometry.tokens, kLanes<Acc>);
    if (vectors <= 1) {
      status = TokenLanes<Acc, V, 1>(problem, parallel).Run();
    } else if (vectors == 2) {
      status = TokenLanes<Acc, V, 2>(problem, parallel).Run();
    } else {
      status = TokenLanes<Acc, V, 4>(problem, parallel).Run();
    }
  });
  return known ? status : Status::kUnsupported;
}

}  // namespace NMS_ISA
}  // namespace nmsparse
