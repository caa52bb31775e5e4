// dx = g Wᵀ, tokens in lanes.
//
// A task owns (batch entry, tile, a few windows): its dxT [rows][width] stays in the first-level cache while the
// columns pass by once, gT [out_features][width] in registers:
//   dxT[k][:] += v * gT[c][:]      over the kept weights (k, v) of column c
// Columns of one block have the same k and are added together, so that dxT[k] is loaded and stored once for all.
#include "cpu/kernels/column_lanes.h"
#include "cpu/kernels/few_tokens.h"
#include "cpu/kernels/tiling.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

template <typename Acc, int vectors, int group>
NMS_INLINE void Scatter(const Acc* g, const uint32_t* offsets, const Acc* const* values, int64_t length, Acc* dx) {
  constexpr int lanes = kLanes<Acc>;
  Vec<Acc> row[group][vectors];
#pragma GCC unroll 8
  for (int c = 0; c < group; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) row[c][v] = Load(g + (c * vectors + v) * lanes);
  }
  for (int64_t i = 0; i < length; ++i) {
    Acc* out = dx + offsets[i];
    Vec<Acc> value[group];
#pragma GCC unroll 8
    for (int c = 0; c < group; ++c) value[c] = Splat(values[c][i]);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      Vec<Acc> sum = Load(out + v * lanes);
#pragma GCC unroll 8
      for (int c = 0; c < group; ++c) sum += value[c] * row[c][v];
      Store(out + v * lanes, sum);
    }
  }
}

// The same for one column of an element-wise weight in `windows` windows, its positions taken from the mask's bits. Two
// windows in turn: a row that is stored and soon loaded again waits for the store, and different windows share no row.
template <typename Acc, int vectors, int windows>
NMS_INLINE void ScatterBits(const Acc* g, const uint32_t* kept, int q, const Acc* const* values, int64_t window_step,
                            Acc* dx) {
  constexpr int lanes = kLanes<Acc>;
  Vec<Acc> row[vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) row[v] = Load(g + v * lanes);
  uint32_t bits[windows];
#pragma GCC unroll 2
  for (int w = 0; w < windows; ++w) bits[w] = kept[w];
  for (int j = 0; j < q; ++j) {
#pragma GCC unroll 2
    for (int w = 0; w < windows; ++w) {
      Acc* out = dx + w * window_step + static_cast<uint32_t>(__builtin_ctz(bits[w])) * (vectors * lanes);
      bits[w] &= bits[w] - 1;
      const Vec<Acc> value = Splat(values[w][j]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) Store(out + v * lanes, Load(out + v * lanes) + value * row[v]);
    }
  }
}

template <typename Acc, typename V, int vectors>
class TransposedTokenLanes {
 public:
  static constexpr int kWidth = vectors * kLanes<Acc>;
  static constexpr int kGroup = 4;

  TransposedTokenLanes(const Problem& problem, Parallel& parallel) : problem_(problem), parallel_(parallel) {
    const Geometry& geometry = problem.geometry;
    step_ = WindowsPerStep(geometry, kWidth * sizeof(Acc));
    list_ = step_ * geometry.q * geometry.bk + Packer<Acc, V>::kSlack;
    // Whole vectors of rows, for the transpose at the end.
    dx_bytes_ = RoundUp(step_ * geometry.rows_per_window(), kLanes<Acc>) * kWidth * sizeof(Acc);
    scratch_bytes_ = RoundUp(dx_bytes_ + list_ * (kGroup * sizeof(Acc) + sizeof(uint32_t)), 64);
  }

  Status Run() {
    return ForRounds(problem_.geometry, kWidth, [&](const Round& round) { return RunRound(round); });
  }

 private:
  Status RunRound(const Round& round) {
    const Geometry& geometry = problem_.geometry;
    Tiles<Acc> g(round, geometry.out_features, kWidth);
    Scratch scratch(scratch_bytes_ * parallel_.workers());
    if (!g || !scratch) return Status::kNoMemory;
    g.Fill(geometry, problem_.g, geometry.out_features, parallel_);
    const int64_t steps = CeilDiv(geometry.windows, step_);
    parallel_.For(round.entries * steps * g.count(), [&](int64_t task, int worker) {
      const int64_t i = task % g.count(), step = task / g.count() % steps, entry = task / g.count() / steps;
      char* mine = scratch.bytes() + worker * scratch_bytes_;
      Windows(round.first_entry + entry, g.tile(entry, i), step * step_, mine);
      Finish(g.row(geometry, entry, i), g.tokens(i), step * step_, reinterpret_cast<const Acc*>(mine));
    });
    return Status::kOk;
  }

  void Windows(int64_t batch, const Acc* g, int64_t first, char* scratch) const {
    const Geometry& geometry = problem_.geometry;
    Acc* dx = reinterpret_cast<Acc*>(scratch);
    Acc* value_lists = reinterpret_cast<Acc*>(scratch + dx_bytes_);
    uint32_t* offsets = reinterpret_cast<uint32_t*>(value_lists + kGroup * list_);
    Packer<Acc, V> packer(geometry, static_cast<const V*>(problem_.values.data) + batch * geometry.values_count(),
                          problem_.mask + batch * geometry.mask_count(), kWidth);
    packer.SetWindows(first, Min(step_, geometry.windows - first));
    std::memset(dx, 0, static_cast<size_t>(dx_bytes_));
    if (IsElementwise(geometry)) return ElementWindows(batch, g, first, dx, value_lists);
    for (int64_t block = 0; block < geometry.out_blocks; ++block) {
      packer.Offsets(block, offsets);
      const int64_t last = Min((block + 1) * geometry.bn, geometry.out_features);
      for (int64_t c = block * geometry.bn; c < last;) {
        const int count = last - c >= kGroup ? kGroup : 1;
        const Acc* values[kGroup];
        for (int i = 0; i < count; ++i) {
          values[i] = value_lists + i * list_;
          packer.Values(c + i, value_lists + i * list_);
        }
        if (count == kGroup) {
          Scatter<Acc, vectors, kGroup>(g + c * kWidth, offsets, values, packer.length(), dx);
        } else {
          Scatter<Acc, vectors, 1>(g + c * kWidth, offsets, values, packer.length(), dx);
        }
        c += count;
      }
    }
  }

  void ElementWindows(int64_t batch, const Acc* g, int64_t first, Acc* dx, Acc* list) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t columns = geometry.out_features, windows = Min(step_, geometry.windows - first);
    const int q = geometry.q, units = geometry.window_units;
    const uint32_t window_mask = WindowMask(geometry);
    const V* values =
        static_cast<const V*>(problem_.values.data) + batch * geometry.values_count() + first * columns * q;
    const uint32_t* mask = problem_.mask + batch * geometry.mask_count() + first * columns;
    auto add = [&](int64_t c, int64_t w, auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;
      const Acc* column[kCount];
      uint32_t bits[kCount];
      for (int i = 0; i < kCount; ++i) {
        const V* in = values + ((w + i) * columns + c) * q;
        if constexpr (std::is_same_v<Acc, V>) {
          column[i] = in;
        } else {
          for (int j = 0; j < q; j += kLanes<Acc>) Store(list + i * list_ + j, LoadFirst<Acc>(in + j, q - j));
          column[i] = list + i * list_;
        }
        bits[i] = KeptBits(mask[(w + i) * columns + c], window_mask, units, q);
      }
      ScatterBits<Acc, vectors, kCount>(g + c * kWidth, bits, q, column, units * kWidth, dx + w * units * kWidth);
    };
    for (int64_t c = 0; c < columns; ++c) {
      int64_t w = 0;
      for (; w + 2 <= windows; w += 2) add(c, w, std::integral_constant<int, 2>{});
      if (w < windows) add(c, w, std::integral_constant<int, 1>{});
    }
  }

  // dxT -> dx.
  void Finish(int64_t row, int64_t tokens, int64_t window, const Acc* dx) const {
    constexpr int lanes = kLanes<Acc>;
    const Geometry& geometry = problem_.geometry;
    const int64_t first = window * geometry.rows_per_window();
    const int64_t last = Min((window + step_) * geometry.rows_per_window(), geometry.in_features);
    for (int64_t k = first; k < last; k += lanes) {
      for (int64_t t = 0; t < tokens; t += lanes) {
        Vec<Acc> rows[lanes];
        for (int i = 0; i < lanes; ++i) rows[i] = Load(dx + (k - first + i) * kWidth + t);
        Transpose<Acc>(rows);
        for (int64_t i = 0; i < lanes && t + i < tokens; ++i) {
          StoreAs<Acc>(problem_.result, (row + t + i) * geometry.in_features + k, rows[i], last - k);
        }
      }
    }
  }

  const Problem& problem_;
  Parallel& parallel_;
  int64_t step_, list_, dx_bytes_, scratch_bytes_;
};

}  // namespace

Status SpmmT(const Problem& problem, Parallel& parallel) {
  if (!IsResult(problem.result.dtype)) return Status::kUnsupported;
  for (const auto special : {SpmmTFewTokens, SpmmTColumnLanes}) {
    if (const Status status = special(problem, parallel); status != Status::kUnsupported) return status;
  }
  Status status = Status::kOk;
  const bool known = DispatchTypes(problem.g.dtype, problem.values.dtype, [&](auto acc, auto value) {
    using Acc = decltype(acc);
    using V = decltype(value);
    const int64_t vectors = CeilDiv(problem.geometry.tokens, kLanes<Acc>);
    if (vectors <= 1) {
      status = TransposedTokenLanes<Acc, V, 1>(problem, parallel).Run();
    } else if (vectors == 2) {
      status = TransposedTokenLanes<Acc, V, 2>(problem, parallel).Run();
    } else {
      status = TransposedTokenLanes<Acc, V, 4>(problem, parallel).Run();
    }
  });
  return known ? status : Status::kUnsupported;
}

}  // namespace NMS_ISA
}  // namespace nmsparse
