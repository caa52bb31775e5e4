// Weights whose units are several columns wide, columns in lanes: dense arithmetic on the kept rows of a block.
//
//   spmm    y[t][:] += x[t][k] * W[k][:]        a matrix product whose rows of W are contiguous and whose columns of x
//                                               are picked: `tokens` x `vectors` sums in registers
//   spmm_t  dx[t][k] += sum of W[k][:] * g[t][:]  the lanes of sixteen (or a vector's worth of) rows added by a
//   butterfly sddmm   dW[k][:]  = sum over t of x[t][k] * g[t][:]   rows x vectors sums in registers over all tokens
//
// Activations are first copied, as accumulator type, to rows with a stride that spreads tokens over the sets of the
// first-level cache. Weights are read in the order of memory. Every sum runs in one order, whoever computes it.
#include "cpu/kernels/column_lanes.h"

#include "cpu/kernels/epilogue.h"
#include "cpu/kernels/tiling.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

// Whole vectors of a block's columns as far as they go, then one that is cut.
template <typename Acc, typename V, int vectors, bool whole>
NMS_INLINE void LoadColumns(const V* p, int64_t count, Vec<Acc> (&out)[vectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    out[v] = whole ? LoadAs<Acc>(p + v * kLanes<Acc>) : LoadFirst<Acc>(p + v * kLanes<Acc>, count - v * kLanes<Acc>);
  }
}

// ---- spmm ----

template <typename Acc, typename V>
class GatheredProduct {
 public:
  static constexpr int kLane = kLanes<Acc>;
  static constexpr int kTokens = 8;
  static constexpr int64_t kMaxStep = 64;

  GatheredProduct(const Problem& problem, Parallel& parallel) : problem_(problem), parallel_(parallel) {
    const Geometry& geometry = problem.geometry;
    row_ = RoundUp(geometry.bn, kLane);
    // With several groups of tokens the chunk's weights are read again and again: from the second-level cache. With one
    // they pass by once, and the chunk is bounded by its sums.
    const int64_t weights = geometry.windows * geometry.q * geometry.bk * geometry.bn * static_cast<int64_t>(sizeof(V));
    const int64_t by_weights = geometry.tokens > kTokens ? (256 << 10) / weights : geometry.out_blocks;
    const int64_t by_sums = (16 << 10) / (Min<int64_t>(geometry.tokens, kTokens) * row_ * sizeof(Acc));
    const int64_t by_parallelism = CeilDiv(geometry.out_blocks, 16);
    blocks_ = Max<int64_t>(1, Min(Min(by_weights, by_sums), by_parallelism));
    // Windows that are added up in registers. From memory, a few streams at a time.
    step_ = Min(geometry.windows, geometry.tokens > kTokens ? kMaxStep : 4);
    sums_bytes_ = RoundUp(kTokens * blocks_ * row_ * sizeof(Acc), 64);
    scratch_bytes_ = RoundUp(sums_bytes_ + step_ * geometry.q + kPositionBytes, 64);
  }

  Status Run() {
    return ForRounds(problem_.geometry, 1, [&](const Round& round) {
      const Geometry& geometry = problem_.geometry;
      Rows<Acc> x(round, geometry.in_features, geometry.windows * geometry.rows_per_window());
      Scratch scratch(scratch_bytes_ * parallel_.workers());
      if (!x || !scratch) return Status::kNoMemory;
      x.Fill(geometry, problem_.x, parallel_);
      const int64_t chunks = CeilDiv(geometry.out_blocks, blocks_);
      parallel_.For(round.entries * chunks, [&](int64_t task, int worker) {
        const int64_t entry = task / chunks, first = task % chunks * blocks_;
        char* sums = scratch.bytes() + worker * scratch_bytes_;
        int64_t t = 0;
        for (; t + 8 <= round.tokens; t += 8) Chunk<8>(round, x, entry, first, t, sums);
        if (t + 4 <= round.tokens) Chunk<4>(round, x, entry, first, t, sums), t += 4;
        if (t + 2 <= round.tokens) Chunk<2>(round, x, entry, first, t, sums), t += 2;
        if (t < round.tokens) Chunk<1>(round, x, entry, first, t, sums);
      });
      return Status::kOk;
    });
  }

 private:
  template <int tokens>
  void Chunk(const Round& round, const Rows<Acc>& x, int64_t entry, int64_t first, int64_t token, char* scratch) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t batch = round.first_entry + entry, bn = geometry.bn;
    const int64_t last = Min(first + blocks_, geometry.out_blocks);
    const V* values = static_cast<const V*>(problem_.values.data) + batch * geometry.values_count();
    const uint32_t* mask = problem_.mask + batch * geometry.mask_count();
    Acc* sums = reinterpret_cast<Acc*>(scratch);
    uint8_t* positions = reinterpret_cast<uint8_t*>(scratch + sums_bytes_);
    std::memset(sums, 0, static_cast<size_t>(tokens * blocks_ * row_) * sizeof(Acc));
    for (int64_t w = 0; w < geometry.windows; w += step_) {
      Step step{x.row(entry, token) + w * geometry.rows_per_window(), x.stride(), Min(step_, geometry.windows - w),
                positions};
      for (int64_t b = first; b < last; ++b) {
        const int64_t index = w * geometry.out_blocks + b;
        for (int64_t i = 0; i < step.windows; ++i) {
          Positions(mask + (index + i * geometry.out_blocks) * geometry.mask_words, geometry,
                    positions + i * geometry.q);
        }
        const V* unit = values + index * UnitSize();
        Acc* out = sums + (b - first) * tokens * row_;
        int64_t c = 0;
        if constexpr (tokens <= 2) {
          for (; c + 4 * kLane <= bn; c += 4 * kLane) Add<tokens, 4, true>(step, unit + c, 0, out + c);
        }
        for (; c + 2 * kLane <= bn; c += 2 * kLane) Add<tokens, 2, true>(step, unit + c, 0, out + c);
        for (; c + kLane <= bn; c += kLane) Add<tokens, 1, true>(step, unit + c, 0, out + c);
        if (c < bn) Add<tokens, 1, false>(step, unit + c, bn - c, out + c);
      }
    }
    for (int64_t b = first; b < last; ++b) {
      for (int t = 0; t < tokens; ++t) {
        const int64_t row = batch * geometry.tokens + round.first_token + token + t;
        const Acc* in = sums + ((b - first) * tokens + t) * row_;
        const int64_t columns = Min(bn, geometry.out_features - b * bn);
        for (int64_t c = 0; c < columns; c += kLane) {
          StoreColumns<Acc>(problem_, batch, row, b * bn + c, Load(in + c), columns - c);
        }
      }
    }
  }

  struct Step {
    const Acc* x;  // first row of the first window, of the first token
    int64_t stride;
    int64_t windows;
    const uint8_t* positions;  // [windows][q]
  };

  int64_t UnitSize() const { return int64_t{problem_.geometry.q} * problem_.geometry.bk * problem_.geometry.bn; }

  // One piece of a block's columns in the windows of a step.
  template <int tokens, int vectors, bool whole>
  NMS_INLINE void Add(const Step& step, const V* first_unit, int64_t count, Acc* out) const {
    const Geometry& geometry = problem_.geometry;
    const int q = geometry.q, bk = geometry.bk;
    const int64_t bn = geometry.bn, stride = step.stride;
    Vec<Acc> sum[tokens][vectors];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[t][v] = Load(out + t * row_ + v * kLane);
    }
    for (int64_t w = 0; w < step.windows; ++w) {
      const V* unit = first_unit + w * geometry.out_blocks * UnitSize();
      const Acc* x = step.x + w * geometry.rows_per_window();
      for (int j = 0; j < q; ++j) {
        const Acc* row = x + step.positions[w * q + j] * bk;
        for (int r = 0; r < bk; ++r, ++row, unit += bn) {
          Vec<Acc> weight[vectors];
          LoadColumns<Acc, V, vectors, whole>(unit, count, weight);
#pragma GCC unroll 8
          for (int t = 0; t < tokens; ++t) {
            const Vec<Acc> splat = Splat(row[t * stride]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sum[t][v] += splat * weight[v];
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) Store(out + t * row_ + v * kLane, sum[t][v]);
    }
  }

  const Problem& problem_;
  Parallel& parallel_;
  int64_t row_, blocks_, step_, sums_bytes_, scratch_bytes_;
};

// ---- spmm_t ----

template <typename Acc, typename V>
class RowSums {
 public:
  static constexpr int kLane = kLanes<Acc>;

  RowSums(const Problem& problem, Parallel& parallel) : problem_(problem), parallel_(parallel) {
    row_ = RoundUp(problem.geometry.rows_per_window(), kLane);
    scratch_bytes_ = RoundUp(problem.geometry.tokens * row_ * sizeof(Acc), 64);
  }

  Status Run() {
    return ForRounds(problem_.geometry, 1, [&](const Round& round) {
      const Geometry& geometry = problem_.geometry;
      Rows<Acc> g(round, geometry.out_features, geometry.out_blocks * geometry.bn);
      Scratch scratch(scratch_bytes_ * parallel_.workers());
      if (!g || !scratch) return Status::kNoMemory;
      g.Fill(geometry, problem_.g, parallel_);
      parallel_.For(round.entries * geometry.windows, [&](int64_t task, int worker) {
        Window(round, g, task / geometry.windows, task % geometry.windows,
               reinterpret_cast<Acc*>(scratch.bytes() + worker * scratch_bytes_));
      });
      return Status::kOk;
    });
  }

 private:
  void Window(const Round& round, const Rows<Acc>& g, int64_t entry, int64_t window, Acc* dx) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t batch = round.first_entry + entry, bn = geometry.bn;
    const int64_t unit_rows = int64_t{geometry.q} * geometry.bk;
    alignas(64) uint8_t positions[kPositionBytes];
    std::memset(dx, 0, static_cast<size_t>(round.tokens * row_) * sizeof(Acc));
    for (int64_t b = 0; b < geometry.out_blocks; ++b) {
      const int64_t index = window * geometry.out_blocks + b;
      Positions(problem_.mask + batch * geometry.mask_count() + index * geometry.mask_words, geometry, positions);
      const V* unit =
          static_cast<const V*>(problem_.values.data) + batch * geometry.values_count() + index * unit_rows * bn;
      const int64_t columns = Min(bn, geometry.out_features - b * bn);
      for (int64_t i = 0; i < unit_rows; i += kLane) {
        const int count = static_cast<int>(Min<int64_t>(kLane, unit_rows - i));
        for (int64_t t = 0; t < round.tokens; ++t) {
          const Acc* row = g.row(entry, t) + b * bn;
          Vec<Acc> products[kLane];
          for (int l = 0; l < kLane; ++l) {
            Vec<Acc> sum{};
            if (l < count) {
              const V* weights = unit + (i + l) * bn;
              int64_t c = 0;
              for (; c + kLane <= columns; c += kLane) sum += LoadAs<Acc>(weights + c) * Load(row + c);
              // Columns beyond the block belong to others, and their g may be infinite.
              if (c < columns) sum += LoadFirst<Acc>(weights + c, columns - c) * LoadFirst<Acc>(row + c, columns - c);
            }
            products[l] = sum;
          }
          alignas(64) Acc sums[kLane];
          Store(sums, SumLanes<Acc>(products));
          Acc* out = dx + t * row_;
          for (int l = 0; l < count; ++l) {
            const int64_t j = (i + l) / geometry.bk, r = (i + l) % geometry.bk;
            out[positions[j] * geometry.bk + r] += sums[l];
          }
        }
      }
    }
    const int64_t first = window * geometry.rows_per_window();
    const int64_t rows = Min(geometry.rows_per_window(), geometry.in_features - first);
    for (int64_t t = 0; t < round.tokens; ++t) {
      const int64_t index = (batch * geometry.tokens + round.first_token + t) * geometry.in_features + first;
      for (int64_t k = 0; k < rows; k += kLane) {
        StoreAs<Acc>(problem_.result, index + k, Load(dx + t * row_ + k), rows - k);
      }
    }
  }

  const Problem& problem_;
  Parallel& parallel_;
  int64_t row_, scratch_bytes_;
};

// ---- sddmm ----

template <typename Acc>
class SampledProduct {
 public:
  static constexpr int kLane = kLanes<Acc>;
  static constexpr int kRows = 8;

  SampledProduct(const Problem& problem, Parallel& parallel) : problem_(problem), parallel_(parallel) {}

  Status Run() {
    const Geometry& geometry = problem_.geometry;
    for (int64_t b = 0; b < geometry.batch; ++b) {
      const Round round{b, 1, 0, geometry.tokens};
      Rows<Acc> x(round, geometry.in_features, geometry.windows * geometry.rows_per_window());
      Rows<Acc> g(round, geometry.out_features, geometry.out_blocks * geometry.bn);
      if (!x || !g) return Status::kNoMemory;
      x.Fill(geometry, problem_.x, parallel_);
      g.Fill(geometry, problem_.g, parallel_);
      // A few blocks of all windows: the g of a block stays in cache.
      const int64_t blocks = Max<int64_t>(1, 64 / geometry.bn);
      const int64_t chunks = CeilDiv(geometry.out_blocks, blocks);
      const int64_t parts = Min<int64_t>(geometry.windows, 8), step = CeilDiv(geometry.windows, parts);
      parallel_.For(chunks * parts, [&](int64_t task, int) {
        const int64_t chunk = task / parts, part = task % parts;
        for (int64_t w = part * step; w < Min((part + 1) * step, geometry.windows); ++w) {
          for (int64_t i = chunk * blocks; i < Min((chunk + 1) * blocks, geometry.out_blocks); ++i) {
            Block(b, x, g, w, i);
          }
        }
      });
    }
    return Status::kOk;
  }

 private:
  void Block(int64_t batch, const Rows<Acc>& x, const Rows<Acc>& g, int64_t window, int64_t block) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t bn = geometry.bn, unit_rows = int64_t{geometry.q} * geometry.bk;
    const int64_t index = window * geometry.out_blocks + block;
    const int64_t rows = geometry.in_features - window * geometry.rows_per_window();
    const int64_t columns = Min(bn, geometry.out_features - block * bn);
    alignas(64) uint8_t positions[kPositionBytes];
    Positions(problem_.mask + batch * geometry.mask_count() + index * geometry.mask_words, geometry, positions);
    const Acc* x_rows = x.row(0, 0) + window * geometry.rows_per_window();
    const int64_t out = batch * geometry.values_count() + index * unit_rows * bn;
    for (int64_t i = 0; i < unit_rows; i += kRows) {
      const Acc* row[kRows];
      for (int64_t l = 0; l < kRows; ++l) {
        const int64_t n = Min(i + l, unit_rows - 1);
        row[l] = x_rows + positions[n / geometry.bk] * geometry.bk + n % geometry.bk;
      }
      for (int64_t c = 0; c < bn; c += 2 * kLane) {
        const Acc* g_rows = g.row(0, 0) + block * bn + c;
        if (c + kLane < bn) {
          Sums<2>(row, x.stride(), g_rows, g.stride(), i, c, columns, rows, x_rows, out);
        } else {
          Sums<1>(row, x.stride(), g_rows, g.stride(), i, c, columns, rows, x_rows, out);
        }
      }
    }
  }

  // Rows [first, first + kRows) of a block's kept rows, columns [column, column + vectors * kLane).
  template <int vectors>
  NMS_INLINE void Sums(const Acc* const* row, int64_t x_stride, const Acc* g, int64_t g_stride, int64_t first,
                       int64_t column, int64_t columns, int64_t rows, const Acc* x_rows, int64_t out) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t bn = geometry.bn, unit_rows = int64_t{geometry.q} * geometry.bk;
    Vec<Acc> sum[kRows][vectors] = {};
    for (int64_t t = 0; t < geometry.tokens; ++t) {
      Vec<Acc> g_row[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) g_row[v] = Load(g + t * g_stride + v * kLane);
#pragma GCC unroll 8
      for (int l = 0; l < kRows; ++l) {
        const Vec<Acc> splat = Splat(row[l][t * x_stride]);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sum[l][v] += splat * g_row[v];
      }
    }
#pragma GCC unroll 8
    for (int l = 0; l < kRows; ++l) {
      if (first + l >= unit_rows) break;
      const bool padding = row[l] - x_rows >= rows;
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        const int64_t c = column + v * kLane;
        Vec<Acc> value = padding ? Vec<Acc>{} : sum[l][v];
        if (c + kLane > columns) {
          // Zero at padding, whatever x and g hold.
          alignas(64) Acc part[kLane];
          Store(part, value);
          value = LoadFirst<Acc>(part, Max<int64_t>(columns - c, 0));
        }
        StoreAs<Acc>(problem_.result, out + (first + l) * bn + c, value, bn - c);
      }
    }
  }

  const Problem& problem_;
  Parallel& parallel_;
};

// ---- which of them ----

// Whether a block's columns fill lanes; loads that are cut short are cheap only where they can be masked.
template <typename Acc>
bool FillsLanes(const Geometry& geometry) {
  if (geometry.bn % kLanes<Acc> == 0) return true;
#if defined(__AVX512F__)
  return geometry.bn > kLanes<Acc>;
#else
  return false;
#endif
}

template <typename Acc>
bool TakesNarrowBlocks(const Geometry& geometry, int64_t max_tokens) {
#if defined(__AVX512F__)
  return geometry.bn >= 3 && geometry.tokens <= max_tokens;
#else
  (void)geometry, (void)max_tokens;
  return false;
#endif
}

}  // namespace

Status SpmmColumnLanes(const Problem& problem, Parallel& parallel) {
  const Geometry& geometry = problem.geometry;
  if (geometry.tokens == 0 || geometry.bn == 1) return Status::kUnsupported;
  Status status = Status::kUnsupported;
  DispatchTypes(problem.x.dtype, problem.values.dtype, [&](auto acc, auto value) {
    using Acc = decltype(acc);
    using V = decltype(value);
    if (!FillsLanes<Acc>(geometry) && !TakesNarrowBlocks<Acc>(geometry, 4)) return;
    status = GatheredProduct<Acc, V>(problem, parallel).Run();
  });
  return status;
}

Status SpmmTColumnLanes(const Problem& problem, Parallel& parallel) {
  const Geometry& geometry = problem.geometry;
  // The butterfly costs as much as the products of a few vectors, for every token.
  if (geometry.tokens == 0 || geometry.bn == 1 || geometry.tokens > (geometry.bn >= 32 ? 4 : 2)) {
    return Status::kUnsupported;
  }
  Status status = Status::kUnsupported;
  DispatchTypes(problem.g.dtype, problem.values.dtype, [&](auto acc, auto value) {
    using Acc = decltype(acc);
    using V = decltype(value);
    if (FillsLanes<Acc>(geometry)) status = RowSums<Acc, V>(problem, parallel).Run();
  });
  return status;
}

Status SddmmColumnLanes(const Problem& problem, Parallel& parallel) {
  const Geometry& geometry = problem.geometry;
  if (geometry.tokens == 0 || geometry.bn == 1) return Status::kUnsupported;
  auto run = [&](auto acc) {
    using Acc = decltype(acc);
    if (!FillsLanes<Acc>(geometry) && !TakesNarrowBlocks<Acc>(geometry, 8)) return Status::kUnsupported;
    return SampledProduct<Acc>(problem, parallel).Run();
  };
  return problem.x.dtype == DType::kF64 ? run(double{}) : run(float{});
}

}  // namespace NMS_ISA
}  // namespace nmsparse
