// Host side of the kernel checks: dtypes, the problems that every kernel runs, and their float64 reference. The
// reference is written from the format's definition alone and shares no code with the kernels.
#ifndef JAX_NMSPARSE_TESTS_NATIVE_REFERENCE_H_
#define JAX_NMSPARSE_TESTS_NATIVE_REFERENCE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/problem.h"

namespace nmsparse::check {

// ---------------------------------------------------------------------------------------------------------- dtypes

struct Format {
  const char* name;
  int bytes;
  double epsilon;  // largest relative error of rounding to nearest
};

inline Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {"f32", 4, 0x1p-24};
    case DType::kF64:
      return {"f64", 8, 0x1p-24};  // stored from a float32 accumulator
    case DType::kF16:
      return {"f16", 2, 0x1p-11};
    case DType::kBF16:
      return {"bf16", 2, 0x1p-8};
    case DType::kF8E4M3FN:
      return {"f8", 1, 0x1p-4};
    case DType::kS8:
      return {"s8", 1, 0};
    case DType::kS32:
      return {"s32", 4, 0};
  }
  return {"unknown", 1, 0};
}

inline double DecodeF8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 128 ? -magnitude : magnitude;
}

template <class T>
void Put(void* to, T v) {
  std::memcpy(to, &v, sizeof(v));
}

template <class T>
T Get(const void* from) {
  T v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline void Encode(DType dtype, double v, void* to) {
  switch (dtype) {
    case DType::kF32:
      return Put(to, static_cast<float>(v));
    case DType::kF64:
      return Put(to, v);
    case DType::kF16:
      return Put(to, __float2half_rn(static_cast<float>(v)));
    case DType::kBF16:
      return Put(to, __float2bfloat16_rn(static_cast<float>(v)));
    case DType::kS8:
      return Put(to, static_cast<int8_t>(std::nearbyint(v)));
    case DType::kS32:
      return Put(to, static_cast<int32_t>(std::nearbyint(v)));
    case DType::kF8E4M3FN: {  // the nearest of all; only small multiples of 1/4 come here, so there are no ties
      static const std::vector<double> table = [] {
        std::vector<double> all;
        for (int bits = 0; bits < 256; ++bits) all.push_back(DecodeF8(bits));
        return all;
      }();
      int best = 0;
      for (int bits = 0; bits < 256; ++bits) best = std::abs(table[bits] - v) < std::abs(table[best] - v) ? bits : best;
      return Put(to, static_cast<uint8_t>(best));
    }
  }
}

inline double Decode(DType dtype, const void* from) {
  switch (dtype) {
    case DType::kF32:
      return Get<float>(from);
    case DType::kF64:
      return Get<double>(from);
    case DType::kF16:
      return __half2float(Get<__half>(from));
    case DType::kBF16:
      return __bfloat162float(Get<__nv_bfloat16>(from));
    case DType::kF8E4M3FN:
      return DecodeF8(Get<uint8_t>(from));
    case DType::kS8:
      return Get<int8_t>(from);
    case DType::kS32:
      return Get<int32_t>(from);
  }
  return 0;
}

// -------------------------------------------------------------------------------------------------------- problems

enum class Op { kSpmm, kSpmmT, kSddmm };
enum class Data { kExact, kReal, kSpecial };           // multiples of 1/4; uniform; kExact with NaN and infinities
enum class Bits { kValid, kSurplus, kMissing, kAny };  // of the mask, against q

struct Pattern {
  int q, window_units, bk, bn;
};

struct Case {
  Op op = Op::kSpmm;
  Pattern pattern{16, 32, 1, 1};
  int64_t batch = 1, tokens = 1, in_features = 64, out_features = 64;
  DType left = DType::kF32;  // x of spmm, g of spmm_t, x and g of sddmm
  DType values = DType::kF32;
  DType result = DType::kF32;
  bool scales = false;
  bool bias = false;
  DType bias_dtype = DType::kF32;
  Activation activation = Activation::kNone;
  Data data = Data::kExact;
  Bits bits = Bits::kValid;
  int group = 0;   // the mask keeps the same number of every `group` units (4: as 2:4 does); 0: q of a window
  int offset = 0;  // elements between each buffer's start and a 256-byte boundary

  Geometry geometry() const {
    Geometry g;
    g.batch = batch, g.tokens = tokens, g.in_features = in_features, g.out_features = out_features;
    g.q = pattern.q, g.bk = pattern.bk, g.bn = pattern.bn, g.window_units = pattern.window_units;
    g.mask_words = (pattern.window_units + 31) / 32;
    g.windows = (in_features + g.rows_per_window() - 1) / g.rows_per_window();
    g.out_blocks = (out_features + g.bn - 1) / g.bn;
    return g;
  }

  std::string Describe() const {
    static const char* const kOps[] = {"spmm", "spmm_t", "sddmm"};
    char text[256];
    std::snprintf(text, sizeof(text),
                  "%s %d:%d/%dx%d batch %lld tokens %lld %lldx%lld %s,%s->%s%s%s%s act %d data %d "
                  "bits %d group %d offset %d",
                  kOps[static_cast<int>(op)], pattern.q, pattern.window_units, pattern.bk, pattern.bn,
                  static_cast<long long>(batch), static_cast<long long>(tokens), static_cast<long long>(in_features),
                  static_cast<long long>(out_features), FormatOf(left).name, FormatOf(values).name,
                  FormatOf(result).name, scales ? " scales" : "", bias ? " bias " : "",
                  bias ? FormatOf(bias_dtype).name : "", static_cast<int>(activation), static_cast<int>(data),
                  static_cast<int>(bits), group, offset);
    return text;
  }
};

inline constexpr Pattern kPatterns[] = {
    {16, 32, 1, 1},   {8, 32, 1, 1},    {3, 32, 1, 1},  {1, 32, 1, 1},   {32, 32, 1, 1},
    {32, 64, 1, 1},   {12, 128, 1, 1},  {3, 6, 1, 1},   {1, 10, 1, 1},   {17, 33, 1, 1},
    {50, 100, 1, 1},  {16, 32, 1, 4},   {8, 32, 1, 8},  {16, 32, 1, 32}, {8, 32, 1, 128},
    {16, 32, 1, 128}, {3, 32, 1, 3},    {16, 32, 4, 4}, {8, 32, 8, 8},   {16, 32, 32, 32},
    {8, 32, 64, 64},  {16, 32, 16, 16}, {3, 7, 3, 5},   {2, 4, 40, 1},   {20, 64, 2, 16},
};
inline constexpr Pattern kWidePatterns[] = {{16, 32, 1, 128},  {3, 32, 1, 128}, {8, 32, 1, 192}, {5, 20, 1, 64},
                                            {9, 32, 4, 128},   {8, 32, 8, 64},  {3, 32, 16, 64}, {8, 32, 64, 64},
                                            {5, 32, 128, 128}, {2, 8, 64, 128}, {24, 32, 1, 64}, {8, 32, 1, 32}};
inline constexpr Pattern kWideElementwise[] = {{16, 32, 1, 1}, {8, 32, 1, 1},  {3, 32, 1, 1}, {1, 32, 1, 1},
                                               {13, 32, 1, 1}, {32, 32, 1, 1}, {4, 32, 1, 1}, {16, 32, 1, 1}};
inline constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr int64_t kSizes[] = {1, 31, 33, 63, 65, 127, 129, 1000};
inline constexpr Op kOps[] = {Op::kSpmm, Op::kSpmmT, Op::kSddmm};

inline std::vector<Case> Problems(Op op, bool quick) {
  std::vector<Case> cases;
  std::mt19937 random(1234);
  auto pick = [&](auto&& list) { return list[random() % std::size(list)]; };
  auto fill = [&](Case c) {  // everything that was not fixed, at random
    c.op = op;
    static constexpr DType kResults[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
    const bool integers = op == Op::kSpmm && c.data == Data::kExact;
    c.result = integers && random() % (c.left == DType::kS8 ? 2 : 8) == 0 ? DType::kS32 : pick(kResults);
    if (random() % 4 == 0) c.offset = 1 + random() % 7;
    if (op == Op::kSpmm && random() % 2) {
      c.scales = random() % 2;
      c.bias = random() % 2;
      c.bias_dtype = pick(kResults);
      c.activation = static_cast<Activation>(random() % 5);
    }
    cases.push_back(c);
  };
  std::vector<std::pair<DType, DType>> pairs;
  for (DType left : kFloats) {
    pairs.push_back({left, left});
    if (op == Op::kSddmm) continue;
    pairs.push_back({left, DType::kS8});
    pairs.push_back({left, DType::kF8E4M3FN});
  }
  if (op == Op::kSpmm) {
    pairs.push_back({DType::kS8, DType::kS8});
    pairs.push_back({DType::kF8E4M3FN, DType::kF8E4M3FN});
  }

  // Every pattern with every dtype pair, other things at random; few tokens and many.
  for (const Pattern& pattern : kPatterns) {
    for (size_t p = 0; p < pairs.size(); ++p) {
      if (quick && (p + (&pattern - kPatterns)) % pairs.size() != 0) continue;
      for (int many = 0; many < 2; ++many) {
        Case c;
        c.pattern = pattern;
        c.left = pairs[p].first, c.values = pairs[p].second;
        c.batch = 1 + random() % 2;
        c.tokens = many ? 65 + random() % 100 : 1 + random() % 20;
        c.in_features = 1 + random() % 400;
        c.out_features = 1 + random() % 300;
        if (random() % 4 == 0) c.in_features *= 8, c.out_features = 1 + random() % 40;
        if (random() % 3 == 0) c.in_features = (c.in_features + 31) / 32 * 32;
        if (random() % 3 == 0) c.out_features = (c.out_features + 31) / 32 * 32;
        fill(c);
      }
    }
  }
  // NaN and infinities reach results by kept units alone; masks that are not valid; real data.
  for (const Pattern& pattern : kPatterns) {
    for (int variant = 0; variant < 5; ++variant) {
      if (quick && variant != (&pattern - kPatterns) % 5) continue;
      Case c;
      c.pattern = pattern;
      c.left = pick(kFloats), c.values = c.left;
      c.tokens = random() % 2 ? 70 : 1 + random() % 9;
      c.in_features = 50 + random() % 200;
      c.out_features = 20 + random() % 100;
      c.data = variant == 0 ? Data::kSpecial : variant == 1 ? Data::kReal : Data::kExact;
      c.bits = variant < 2 ? Bits::kValid : static_cast<Bits>(variant - 1);
      fill(c);
    }
  }
  // So many output tiles that the whole device is busy with one each.
  for (const Pattern& pattern : {kPatterns[0], kPatterns[13], kPatterns[19]}) {
    Case c;
    c.pattern = pattern;
    c.left = c.values = pick(kFloats);
    (op == Op::kSddmm ? c.tokens : op == Op::kSpmm ? c.in_features : c.out_features) = 40;
    (op == Op::kSpmmT ? c.tokens : c.out_features) = 1490;
    (op == Op::kSpmm ? c.tokens : c.in_features) = 1410;
    c.data = pattern.bk == 32 ? Data::kSpecial : Data::kExact;
    fill(c);
    if (quick) break;
  }
  // What the feature-major kernels take: 16-bit data (float32 in spmm, too), wide columns, whole 16-byte runs of
  // tokens, aligned buffers. Of the first pattern also with tokens enough for the largest tiles of spmm, and for sddmm
  // to share them among blocks.
  for (const Pattern& pattern : kWidePatterns) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      if (dtype == DType::kF32 && op != Op::kSpmm) continue;
      for (int64_t tokens : {8, 72, 264, 1416}) {
        if (tokens > 264 && (quick || op == Op::kSpmmT || &pattern != kWidePatterns)) continue;
        Case c;
        c.pattern = pattern;
        c.left = c.values = dtype;
        c.batch = tokens == 72 ? 2 : 1;
        c.tokens = tokens;
        c.in_features = tokens > 264 ? 200 : quick ? 100 + random() % 300 : 300 + random() % 1000;
        c.out_features = tokens > 264 ? 1490 : 50 + random() % 200;
        if (pattern.bn == 1) c.out_features = (c.out_features + 7) / 8 * 8;
        c.data = tokens == 8 && (pattern.bn == 1 || random() % 2) ? Data::kSpecial : Data::kExact;
        fill(c);
        cases.back().offset = 0;
        cases.back().result = random() % 2 ? dtype : DType::kF32;
      }
    }
  }
  // The same for element-wise weights, whole windows of rows and whole 16-byte runs of values.
  for (const Pattern& pattern : kWideElementwise) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (int64_t tokens : {8, 72, 264, 1416}) {
        if (tokens > 264 && (quick || op != Op::kSpmm || pattern.q != 16)) continue;
        Case c;
        c.pattern = pattern;
        c.left = c.values = dtype;
        c.batch = tokens == 72 ? 2 : 1;
        c.tokens = tokens;
        c.in_features = 64 * (1 + random() % (quick ? 5 : 12)) + (c.batch == 1 ? 32 * (random() % 2) : 0);
        c.out_features = tokens > 264 ? 1496 : 8 * (1 + random() % 40);
        c.group = pattern.q == 16 && random() % 2 ? 4 : 0;
        if (tokens == 8) c.data = random() % 2 ? Data::kSpecial : Data::kReal;
        if (tokens == 264 && !c.group) c.bits = static_cast<Bits>(random() % 4);
        fill(c);
        cases.back().offset = 0;
        cases.back().result = random() % 2 ? dtype : DType::kF32;
      }
    }
  }
  // What the kernels for one to four tokens of element-wise and of vector-wise weights take.
  for (const Pattern& pattern : {kPatterns[0], kPatterns[1], kPatterns[2], kPatterns[14]}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t tokens : {1, 3}) {
        Case c;
        c.pattern = pattern;
        c.left = c.values = dtype;
        c.tokens = tokens, c.in_features = 1024, c.out_features = 384;
        fill(c);
        cases.back().offset = 0;
      }
    }
  }
  if (quick) return cases;
  // Tails: token counts, out_features of 1 to 300, sizes around powers of two with the bias on and off.
  for (const Pattern& pattern : {kPatterns[0], kPatterns[11], kPatterns[15], kPatterns[19]}) {
    for (int64_t tokens : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 32, 63, 64, 65, 128, 129}) {
      Case c;
      c.pattern = pattern;
      c.left = c.values = pick(kFloats);
      c.tokens = tokens, c.in_features = 256, c.out_features = 160;
      fill(c);
    }
    for (int64_t out_features = 1; out_features <= 300; ++out_features) {
      Case c;
      c.pattern = pattern;
      c.left = c.values = pick(kFloats);
      c.tokens = 1 + out_features % 3, c.in_features = 64, c.out_features = out_features;
      fill(c);
    }
    for (int64_t in_features : kSizes) {
      for (int64_t out_features : kSizes) {
        Case c;
        c.pattern = pattern;
        c.left = c.values = pick(kFloats);
        c.tokens = 3, c.in_features = in_features, c.out_features = out_features;
        c.bias = op == Op::kSpmm && (in_features + out_features) / 2 % 2;
        fill(c);
      }
    }
  }
  return cases;
}

// ------------------------------------------------------------------------------------------- host data, reference

struct HostArray {
  DType dtype = DType::kF32;
  std::vector<double> logical;  // what the stored elements mean
  std::vector<uint8_t> bytes;

  HostArray() = default;
  HostArray(DType type, int64_t count) : dtype(type), logical(count), bytes(count * FormatOf(type).bytes) {}

  void Set(int64_t i, double v) {
    uint8_t* at = bytes.data() + i * FormatOf(dtype).bytes;
    Encode(dtype, v, at);
    logical[i] = Decode(dtype, at);
  }
};

// Where element i of [batch, tokens, features] lies in [batch, features, tokens].
inline int64_t FeatureMajorIndex(int64_t i, int64_t tokens, int64_t features) {
  const int64_t feature = i % features, token = i / features % tokens, batch = i / features / tokens;
  return (batch * features + feature) * tokens + token;
}

// The stored elements of [batch, tokens, features] as [batch, features, tokens].
inline HostArray FeatureMajor(const HostArray& array, const Geometry& g, int64_t features) {
  HostArray result(array.dtype, static_cast<int64_t>(array.logical.size()));
  const int bytes = FormatOf(array.dtype).bytes;
  for (int64_t i = 0; i < static_cast<int64_t>(array.logical.size()); ++i) {
    const int64_t to = FeatureMajorIndex(i, g.tokens, features);
    std::memcpy(&result.bytes[to * bytes], &array.bytes[i * bytes], bytes);
    result.logical[to] = array.logical[i];
  }
  return result;
}

inline HostArray RandomArray(DType dtype, int64_t count, Data data, std::mt19937& random) {
  HostArray array(dtype, count);
  for (int64_t i = 0; i < count; ++i) {
    double v = (static_cast<int>(random() % 17) - 8) / 4.0;
    if (data == Data::kReal) v = (random() % 20001 - 10000.0) / 10000.0 * (dtype == DType::kS8 ? 127 : 1);
    if (data == Data::kSpecial && random() % 64 == 0) v = random() % 2 ? std::nan("") : HUGE_VAL;
    array.Set(i, v);
  }
  return array;
}

inline double Activated(Activation activation, double v) {
  switch (activation) {
    case Activation::kRelu:
      return v <= 0 ? 0 : v;
    case Activation::kGelu:
      return 0.5 * v * std::erfc(-v * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    case Activation::kSilu:
      return v / (1 + std::exp(-v));
    default:
      return v;
  }
}

struct Instance {
  Geometry geometry;
  HostArray x, g, values, bias;
  std::vector<uint32_t> mask;
  std::vector<float> scales;
  int64_t result_count = 0;
  std::vector<double> expected, magnitude;  // magnitude: sum of |products|, which rounding errors scale with
};

inline std::vector<int> KeptUnits(const Geometry& geometry, const uint32_t* words) {
  std::vector<int> kept;
  for (int unit = 0; unit < geometry.window_units && static_cast<int>(kept.size()) < geometry.q; ++unit) {
    if (words[unit / 32] >> unit % 32 & 1) kept.push_back(unit);
  }
  return kept;
}

inline std::vector<uint32_t> RandomMask(const Geometry& g, Bits bits, int group, std::mt19937& random) {
  std::vector<uint32_t> mask(g.batch * g.mask_count());
  for (int64_t block = 0; block < g.batch * g.windows * g.out_blocks; ++block) {
    uint32_t* words = &mask[block * g.mask_words];
    for (int first = 0; group && first < g.window_units; first += group) {
      for (int unit = 0, left = g.q * group / g.window_units; left > 0; ++unit) {
        if (static_cast<int>(random() % (group - unit)) >= left) continue;
        words[(first + unit) / 32] |= 1u << (first + unit) % 32, --left;
      }
    }
    if (group) continue;
    int count = g.q;
    if (bits == Bits::kSurplus) count = g.q + random() % (g.window_units - g.q + 1);
    if (bits == Bits::kMissing) count = random() % (g.q + 1);
    for (int unit = 0, left = count; unit < g.window_units && left > 0; ++unit) {
      if (static_cast<int>(random() % (g.window_units - unit)) < left) words[unit / 32] |= 1u << unit % 32, --left;
    }
    if (bits == Bits::kSurplus && g.window_units % 32) words[g.mask_words - 1] |= ~0u << g.window_units % 32;
    if (bits == Bits::kAny) {
      for (int i = 0; i < g.mask_words; ++i) words[i] = random() % 4 ? random() : ~0u * (random() % 2);
    }
  }
  return mask;
}

inline Instance MakeInstance(const Case& c, std::mt19937& random) {
  Instance s;
  const Geometry& g = s.geometry = c.geometry();
  if (c.op != Op::kSpmmT) s.x = RandomArray(c.left, g.batch * g.tokens * g.in_features, c.data, random);
  if (c.op != Op::kSpmm) s.g = RandomArray(c.left, g.batch * g.tokens * g.out_features, c.data, random);
  const Data value_data = c.data == Data::kSpecial ? Data::kExact : c.data;
  if (c.op != Op::kSddmm) s.values = RandomArray(c.values, g.batch * g.values_count(), value_data, random);
  s.mask = RandomMask(g, c.bits, c.group, random);
  const int64_t features = g.batch * g.out_features;
  for (int64_t i = 0; c.scales && i < features; ++i) s.scales.push_back(std::ldexp(1.0f, random() % 3 - 1));
  if (c.bias) s.bias = RandomArray(c.bias_dtype, features, value_data, random);

  s.result_count = c.op == Op::kSpmm    ? g.batch * g.tokens * g.out_features
                   : c.op == Op::kSpmmT ? g.batch * g.tokens * g.in_features
                                        : g.batch * g.values_count();
  s.expected.assign(s.result_count, 0.0);
  s.magnitude.assign(s.result_count, 0.0);
  for (int64_t b = 0; b < g.batch; ++b) {
    for (int64_t block = 0; block < g.windows * g.out_blocks; ++block) {
      const int64_t block_index = b * g.windows * g.out_blocks + block;
      const std::vector<int> kept = KeptUnits(g, &s.mask[block_index * g.mask_words]);
      for (size_t j = 0; j < kept.size(); ++j) {
        for (int element = 0; element < g.bk * g.bn; ++element) {
          const int64_t k = (block / g.out_blocks * g.window_units + kept[j]) * g.bk + element / g.bn;
          const int64_t n = block % g.out_blocks * g.bn + element % g.bn;
          const int64_t v = (block_index * g.q + j) * g.bk * g.bn + element;
          if (k >= g.in_features || n >= g.out_features) continue;
          for (int64_t t = b * g.tokens; t < (b + 1) * g.tokens; ++t) {
            const int64_t at_x = t * g.in_features + k, at_g = t * g.out_features + n;
            const int64_t to = c.op == Op::kSpmm ? at_g : c.op == Op::kSpmmT ? at_x : v;
            const double left = c.op == Op::kSpmmT ? s.g.logical[at_g] : s.x.logical[at_x];
            const double right = c.op == Op::kSddmm ? s.g.logical[at_g] : s.values.logical[v];
            s.expected[to] += left * right;
            s.magnitude[to] += std::abs(left * right);
          }
        }
      }
    }
  }
  for (int64_t i = 0; c.op == Op::kSpmm && i < s.result_count; ++i) {
    const int64_t feature = i / (g.tokens * g.out_features) * g.out_features + i % g.out_features;
    if (c.scales) s.expected[i] *= s.scales[feature], s.magnitude[i] *= s.scales[feature];
    if (c.bias) s.expected[i] += s.bias.logical[feature], s.magnitude[i] += std::abs(s.bias.logical[feature]);
    s.expected[i] = Activated(c.activation, s.expected[i]);
  }
  return s;
}

}  // namespace nmsparse::check

#endif  // JAX_NMSPARSE_TESTS_NATIVE_REFERENCE_H_
