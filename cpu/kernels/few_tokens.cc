// Element-wise weights and few tokens (4 for spmm, 8 for spmm_t, 32 for sddmm), with AVX-512: bytes decide, so weights
// and mask are read once, in the order of memory, and nothing is gathered from memory.
//
// A window of x is 32 floats, two registers. VPCOMPRESSB turns a mask word into the positions of its kept weights; a
// run of columns is decoded at a time, so that position n belongs to value n of the run (n = column * q + j). Then, for
// sixteen kept weights at once,
//   spmm    acc[n] += x[position[n]] * value[n]   VPERMT2PS looks x up; acc in the first-level cache, summed over each
//                                                 column's q entries only after the last window
//   sddmm   dv[n] = x[position[n]] * g[n / q]     a second permutation spreads g over its columns' entries
// and the other way round, for one column at once, its weights expanded to the window's 32 rows by VEXPANDPS:
//   spmm_t  dx[0..31] += value[0..31] * g[c]      dx in two registers over all columns; the multiply-add is masked, so
//                                                 that 0 * Inf never reaches a row that is not kept
#include "cpu/kernels/few_tokens.h"

#include "cpu/kernels/epilogue.h"
#include "cpu/kernels/tiling.h"

namespace nmsparse {
namespace NMS_ISA {

#if defined(__AVX512VBMI2__)
namespace {

// Kept entries of a run: bounds the positions and sums that stay in the first-level cache.
constexpr int64_t kRunEntries = 2048;

// Rows of in [batch, tokens, features] as float: row t of an entry at data + (entry * tokens + t) * stride, windows
// `units` apart in memory 32 apart here, zeros up to the stride.
class FloatRows {
 public:
  FloatRows(const Geometry& geometry, int64_t features, int units, int64_t tokens)
      : features_(features),
        units_(units),
        tokens_(tokens),
        // The slack is read, but not used, by loads that begin at the last features.
        stride_(CeilDiv(features, units) * 32 + 64),
        scratch_(geometry.batch * tokens * stride_ * static_cast<int64_t>(sizeof(float))) {}

  explicit operator bool() const { return static_cast<bool>(scratch_); }
  int64_t stride() const { return stride_; }
  const float* entry(int64_t batch) const {
    return reinterpret_cast<const float*>(scratch_.bytes()) + batch * tokens_ * stride_;
  }

  void Fill(const Geometry& geometry, const Operand& in, Parallel& parallel) {
    parallel.For(geometry.batch * tokens_, [&](int64_t row, int) {
      float* out = reinterpret_cast<float*>(scratch_.bytes()) + row * stride_;
      const int64_t batch = row / tokens_, token = row % tokens_;
      std::memset(out, 0, static_cast<size_t>(stride_) * sizeof(float));
      if (token >= geometry.tokens) return;
      const int64_t first = (batch * geometry.tokens + token) * features_;
      if (in.dtype == DType::kF32) Convert(static_cast<const float*>(in.data) + first, out);
      if (in.dtype == DType::kBF16) Convert(static_cast<const BF16*>(in.data) + first, out);
      if (in.dtype == DType::kF16) Convert(static_cast<const F16*>(in.data) + first, out);
    });
  }

 private:
  template <typename T>
  void Convert(const T* in, float* out) const {
    for (int64_t k = 0; k < features_; k += units_, out += 32) {
      const int64_t count = Min<int64_t>(units_, features_ - k);
      Store(out, LoadFirst<float>(in + k, Min<int64_t>(count, 16)));
      if (count > 16) Store(out + 16, LoadFirst<float>(in + k + 16, count - 16));
    }
  }

  int64_t features_;
  int units_;
  int64_t tokens_, stride_;
  Scratch scratch_;
};

// Positions of columns [0, columns) of a window, q bytes each. The stores overlap, which also drops the extra bits of a
// corrupt word; where bits are missing the window's last unit is taken.
NMS_INLINE void RunPositions(const uint32_t* mask, int64_t columns, const Geometry& geometry, uint8_t* positions) {
  const __m256i iota = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                        22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
  const __m256i last = _mm256_set1_epi8(static_cast<char>(geometry.window_units - 1));
  const uint32_t window_mask = WindowMask(geometry);
  for (int64_t c = 0; c < columns; ++c, positions += geometry.q) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                        _mm256_mask_compress_epi8(last, mask[c] & window_mask, iota));
  }
}

NMS_INLINE __m512i Positions16(const uint8_t* positions) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(positions)));
}

struct Window {
  __m512 low, high;
  NMS_INLINE void Load(const float* x) {
    low = _mm512_loadu_ps(x);
    high = _mm512_loadu_ps(x + 16);
  }
  // Only the five lowest bits of a position count, whatever it holds.
  NMS_INLINE Vec<float> At(__m512i positions) const { return (Vec<float>)_mm512_permutex2var_ps(low, positions, high); }
};

// ---- spmm ----

template <typename V, int tokens>
class DotProducts {
 public:
  DotProducts(const Problem& problem, const FloatRows& x) : problem_(problem), x_(x) {
    const Geometry& geometry = problem.geometry;
    columns_ = Max<int64_t>(16, Min(kRunEntries / (geometry.q * tokens), RoundUp(geometry.out_features, 16)) / 16 * 16);
    entries_ = RoundUp(columns_ * geometry.q, 16);
    sums_bytes_ = (tokens * entries_ + 16) * static_cast<int64_t>(sizeof(float));
  }

  int64_t runs() const { return CeilDiv(problem_.geometry.out_features, columns_); }
  int64_t scratch_bytes() const { return RoundUp(sums_bytes_ + kWindows * (entries_ + 64), 64); }

  void Run(int64_t batch, int64_t run, char* scratch) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t first = run * columns_, count = Min(columns_, geometry.out_features - first);
    float* sums = reinterpret_cast<float*>(scratch);
    uint8_t* positions = reinterpret_cast<uint8_t*>(scratch + sums_bytes_);
    std::memset(sums, 0, static_cast<size_t>(sums_bytes_));
    int64_t w = 0;
    for (; w + kWindows <= geometry.windows; w += kWindows) Step<kWindows>(batch, w, first, count, sums, positions);
    for (; w < geometry.windows; ++w) Step<1>(batch, w, first, count, sums, positions);
    Finish(batch, first, count, sums);
  }

 private:
  // Windows at a time: their parts of x fill half of the registers, and the sums are loaded and stored once for all.
  static constexpr int kWindows = tokens <= 2 ? 4 : 2;

  template <int windows>
  NMS_INLINE void Step(int64_t batch, int64_t window, int64_t first, int64_t count, float* sums,
                       uint8_t* positions) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t length = count * geometry.q, position_step = entries_ + 64;
    const V* values[windows];
    Window x[windows][tokens];
#pragma GCC unroll 4
    for (int i = 0; i < windows; ++i) {
      const int64_t column = (window + i) * geometry.out_features + first;
      RunPositions(problem_.mask + batch * geometry.mask_count() + column, count, geometry,
                   positions + i * position_step);
      values[i] = static_cast<const V*>(problem_.values.data) + batch * geometry.values_count() + column * geometry.q;
#pragma GCC unroll 4
      for (int t = 0; t < tokens; ++t) x[i][t].Load(x_.entry(batch) + t * x_.stride() + (window + i) * 32);
    }
    auto add = [&](int64_t n, auto load) __attribute__((always_inline)) {
      Vec<float> sum[tokens];
#pragma GCC unroll 4
      for (int t = 0; t < tokens; ++t) sum[t] = Load(sums + t * entries_ + n);
#pragma GCC unroll 4
      for (int i = 0; i < windows; ++i) {
        const __m512i at = Positions16(positions + i * position_step + n);
        const Vec<float> value = load(values[i] + n);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; ++t) sum[t] += x[i][t].At(at) * value;
      }
#pragma GCC unroll 4
      for (int t = 0; t < tokens; ++t) Store(sums + t * entries_ + n, sum[t]);
    };
    int64_t n = 0;
    for (; n + 16 <= length; n += 16) add(n, [](const V* p) { return LoadAs<float>(p); });
    if (n < length) add(n, [&](const V* p) { return LoadFirst<float>(p, length - n); });
  }

  void Finish(int64_t batch, int64_t first, int64_t count, const float* sums) const {
    const Geometry& geometry = problem_.geometry;
    const int q = geometry.q;
    for (int64_t t = 0; t < Min<int64_t>(tokens, geometry.tokens); ++t) {
      for (int64_t c = 0; c < count; c += 16) {
        alignas(64) float column[16] = {};
        for (int64_t l = 0; l < Min<int64_t>(16, count - c); ++l) {
          const float* entry = sums + t * entries_ + (c + l) * q;
          float total = 0;
          for (int j = 0; j < q; ++j) total += entry[j];
          column[l] = total;
        }
        StoreColumns<float>(problem_, batch, batch * geometry.tokens + t, first + c, Load(column), count - c);
      }
    }
  }

  const Problem& problem_;
  const FloatRows& x_;
  int64_t columns_, entries_, sums_bytes_;
};

template <typename V, int tokens>
Status RunDotProducts(const Problem& problem, Parallel& parallel) {
  FloatRows x(problem.geometry, problem.geometry.in_features, problem.geometry.window_units, tokens);
  const DotProducts<V, tokens> kernel(problem, x);
  Scratch scratch(kernel.scratch_bytes() * parallel.workers());
  if (!x || !scratch) return Status::kNoMemory;
  x.Fill(problem.geometry, problem.x, parallel);
  parallel.For(problem.geometry.batch * kernel.runs(), [&](int64_t task, int worker) {
    kernel.Run(task / kernel.runs(), task % kernel.runs(), scratch.bytes() + worker * kernel.scratch_bytes());
  });
  return Status::kOk;
}

// ---- spmm_t ----

template <typename V, int tokens, int windows>
NMS_INLINE void ExpandWindows(const Problem& problem, const FloatRows& g, int64_t batch, int64_t window) {
  const Geometry& geometry = problem.geometry;
  const int q = geometry.q, units = geometry.window_units;
  const int64_t columns = geometry.out_features;
  const uint32_t window_mask = WindowMask(geometry);
  const V* all = static_cast<const V*>(problem.values.data);
  const V* values = all + batch * geometry.values_count() + window * columns * q;
  const uint32_t* mask = problem.mask + batch * geometry.mask_count() + window * columns;
  const float* rows = g.entry(batch);
  __m512 low[windows][tokens], high[windows][tokens];
#pragma GCC unroll 4
  for (int i = 0; i < windows; ++i) {
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) low[i][t] = high[i][t] = _mm512_setzero_ps();
  }
  auto add = [&](int64_t c, auto load) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < windows; ++i) {
      const uint32_t bits = KeptBits(mask[i * columns + c], window_mask, units, q);
      const __mmask16 low_bits = static_cast<__mmask16>(bits), high_bits = static_cast<__mmask16>(bits >> 16);
      const int below = __builtin_popcount(bits & 0xffffu);
      const V* value = values + (i * columns + c) * q;
      const __m512 v_low = _mm512_maskz_expand_ps(low_bits, (__m512)load(value, q));
      const __m512 v_high = _mm512_maskz_expand_ps(high_bits, (__m512)load(value + below, q - below));
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) {
        const __m512 row = _mm512_set1_ps(rows[t * g.stride() + c]);
        low[i][t] = _mm512_mask3_fmadd_ps(v_low, row, low[i][t], low_bits);
        high[i][t] = _mm512_mask3_fmadd_ps(v_high, row, high[i][t], high_bits);
      }
    }
  };
  // A whole vector may be read where at least 32 values follow in the array: elsewhere, at its very end, only what a
  // column holds.
  const int64_t total = geometry.batch * geometry.values_count();
  const int64_t last_start = (values - all) + (windows - 1) * columns * q;
  const int64_t safe = Max<int64_t>(0, Min(columns, (total - 32 - q - last_start) / q));
  int64_t c = 0;
  for (; c < safe; ++c) add(c, [](const V* p, int) { return LoadAs<float>(p); });
  for (; c < columns; ++c) add(c, [](const V* p, int count) { return LoadFirst<float>(p, Max(count, 0)); });
  for (int i = 0; i < windows; ++i) {
    const int64_t first = (window + i) * units;
    const int64_t count = Min<int64_t>(units, geometry.in_features - first);
    for (int64_t t = 0; t < Min<int64_t>(tokens, geometry.tokens); ++t) {
      const int64_t index = (batch * geometry.tokens + t) * geometry.in_features + first;
      StoreAs<float>(problem.result, index, (Vec<float>)low[i][t], count);
      if (count > 16) StoreAs<float>(problem.result, index + 16, (Vec<float>)high[i][t], count - 16);
    }
  }
}

template <typename V, int tokens>
Status RunExpand(const Problem& problem, Parallel& parallel) {
  constexpr int kWindows = tokens <= 4 ? 2 : 1;
  const Geometry& geometry = problem.geometry;
  // g in windows of 32 of 32: rows without gaps.
  FloatRows g(geometry, geometry.out_features, 32, tokens);
  if (!g) return Status::kNoMemory;
  g.Fill(geometry, problem.g, parallel);
  const int64_t steps = CeilDiv(geometry.windows, kWindows);
  parallel.For(geometry.batch * steps, [&](int64_t task, int) {
    const int64_t batch = task / steps, window = task % steps * kWindows;
    if (window + kWindows <= geometry.windows) {
      ExpandWindows<V, tokens, kWindows>(problem, g, batch, window);
    } else {
      ExpandWindows<V, tokens, 1>(problem, g, batch, window);
    }
  });
  return Status::kOk;
}

// ---- sddmm ----

// tokens == 0: any number of them, x read from the first-level cache instead of held in registers.
template <int tokens>
class OuterProducts {
 public:
  OuterProducts(const Problem& problem, const FloatRows& x, const FloatRows& g) : problem_(problem), x_(x), g_(g) {
    const Geometry& geometry = problem.geometry;
    columns_ = Max<int64_t>(1, Min<int64_t>(kRunEntries / geometry.q, geometry.out_features));
    for (int r = 0; r < geometry.q; ++r) {
      for (int l = 0; l < 16; ++l) spread_[r][l] = (r + l) / geometry.q;
    }
  }

  int64_t runs() const { return CeilDiv(problem_.geometry.out_features, columns_); }

  void Run(int64_t batch, int64_t window, int64_t run) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t first = run * columns_, count = Min(columns_, geometry.out_features - first);
    const int64_t length = count * geometry.q;
    const int64_t column = window * geometry.out_features + first;
    alignas(64) uint8_t positions[kRunEntries + 64];
    RunPositions(problem_.mask + batch * geometry.mask_count() + column, count, geometry, positions);
    const float* x_rows = x_.entry(batch) + window * 32;
    Window x[Max(tokens, 1)];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) x[t].Load(x_rows + t * x_.stride());
    const float* g = g_.entry(batch) + first;
    const int64_t index = batch * geometry.values_count() + column * geometry.q;
    // Rows beyond in_features: zero, though g may be infinite.
    const int64_t rows = geometry.in_features - window * geometry.window_units;
    const __m512i last = _mm512_set1_epi32(static_cast<int>(Min<int64_t>(rows, geometry.window_units)) - 1);
    int64_t c = 0;
    int r = 0;
    for (int64_t n = 0; n < length; n += 16) {
      const __m512i at = Positions16(positions + n);
      const __m512i spread = _mm512_load_si512(spread_[r]);
      Vec<float> sum{};
      for (int64_t t = 0; tokens == 0 && t < geometry.tokens; ++t) {
        const __m512 row = _mm512_permutexvar_ps(spread, _mm512_loadu_ps(g + t * g_.stride() + c));
        x[0].Load(x_rows + t * x_.stride());
        sum += x[0].At(at) * (Vec<float>)row;
      }
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) {
        const __m512 row = _mm512_permutexvar_ps(spread, _mm512_loadu_ps(g + t * g_.stride() + c));
        sum += x[t].At(at) * (Vec<float>)row;
      }
      sum = (Vec<float>)_mm512_maskz_mov_ps(_mm512_cmple_epi32_mask(at, last), (__m512)sum);
      StoreAs<float>(problem_.result, index + n, sum, length - n);
      for (r += 16; r >= geometry.q; r -= geometry.q) ++c;
    }
  }

 private:
  const Problem& problem_;
  const FloatRows& x_;
  const FloatRows& g_;
  int64_t columns_;
  // spread_[r][l]: entry r + l of a column belongs to this many columns further.
  alignas(64) int32_t spread_[32][16];
};

template <int tokens>
Status RunOuterProducts(const Problem& problem, Parallel& parallel) {
  const Geometry& geometry = problem.geometry;
  const int64_t rows = Max<int64_t>(tokens, geometry.tokens);
  FloatRows x(geometry, geometry.in_features, geometry.window_units, rows);
  FloatRows g(geometry, geometry.out_features, 32, rows);
  if (!x || !g) return Status::kNoMemory;
  x.Fill(geometry, problem.x, parallel);
  g.Fill(geometry, problem.g, parallel);
  const OuterProducts<tokens> kernel(problem, x, g);
  const int64_t runs = kernel.runs();
  parallel.For(geometry.batch * geometry.windows * runs, [&](int64_t task, int) {
    kernel.Run(task / runs / geometry.windows, task / runs % geometry.windows, task % runs);
  });
  return Status::kOk;
}

// ---- which of them ----

bool Takes(const Problem& problem, DType activations, DType values) {
  const bool is_float = activations == DType::kF32 || activations == DType::kBF16 || activations == DType::kF16;
  return is_float && (values == activations || values == DType::kS8) && IsElementwise(problem.geometry) &&
         problem.geometry.tokens > 0 && IsResult(problem.result.dtype);
}

template <typename F>
Status ForValues(DType values, F&& f) {
  switch (values) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(BF16{});
    case DType::kF16:
      return f(F16{});
    default:
      return f(int8_t{});
  }
}

}  // namespace

Status SpmmFewTokens(const Problem& problem, Parallel& parallel) {
  const int64_t tokens = problem.geometry.tokens;
  if (!Takes(problem, problem.x.dtype, problem.values.dtype) || tokens > 4) return Status::kUnsupported;
  return ForValues(problem.values.dtype, [&](auto value) {
    using V = decltype(value);
    if (tokens == 1) return RunDotProducts<V, 1>(problem, parallel);
    if (tokens == 2) return RunDotProducts<V, 2>(problem, parallel);
    return RunDotProducts<V, 4>(problem, parallel);
  });
}

Status SpmmTFewTokens(const Problem& problem, Parallel& parallel) {
  const int64_t tokens = problem.geometry.tokens;
  if (!Takes(problem, problem.g.dtype, problem.values.dtype) || tokens > 8) return Status::kUnsupported;
  return ForValues(problem.values.dtype, [&](auto value) {
    using V = decltype(value);
    if (tokens == 1) return RunExpand<V, 1>(problem, parallel);
    if (tokens == 2) return RunExpand<V, 2>(problem, parallel);
    if (tokens <= 4) return RunExpand<V, 4>(problem, parallel);
    return RunExpand<V, 8>(problem, parallel);
  });
}

Status SddmmFewTokens(const Problem& problem, Parallel& parallel) {
  const int64_t tokens = problem.geometry.tokens;
  if (!Takes(problem, problem.x.dtype, problem.g.dtype) || tokens > 32) return Status::kUnsupported;
  if (tokens == 1) return RunOuterProducts<1>(problem, parallel);
  if (tokens == 2) return RunOuterProducts<2>(problem, parallel);
  if (tokens <= 4) return RunOuterProducts<4>(problem, parallel);
  if (tokens <= 8) return RunOuterProducts<8>(problem, parallel);
  return RunOuterProducts<0>(problem, parallel);
}

#else  // no AVX-512: the kernels with tokens in lanes take these problems too

Status SpmmFewTokens(const Problem&, Parallel&) { return Status::kUnsupported; }
Status SpmmTFewTokens(const Problem&, Parallel&) { return Status::kUnsupported; }
Status SddmmFewTokens(const Problem&, Parallel&) { return Status::kUnsupported; }

#endif

}  // namespace NMS_ISA
}  // namespace nmsparse
