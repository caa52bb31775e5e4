// Host side of the kernel checks: the problems that every kernel runs.
#ifndef JAX_NMSPARSE_TESTS_NATIVE_PROBLEMS_H_
#define JAX_NMSPARSE_TESTS_NATIVE_PROBLEMS_H_

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/problem.h"
#include "tests/native/formats.h"

namespace nmsparse::check {

// kExpand: dense W, as spmm of an identity. kCompress: the kept units of dense g, as sddmm of an identity.
enum class Op { kSpmm, kSpmmT, kSddmm, kExpand, kCompress };
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
    static const char* const kOps[] = {"spmm", "spmm_t", "sddmm", "expand", "compress"};
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
inline constexpr Op kOps[] = {Op::kSpmm, Op::kSpmmT, Op::kSddmm, Op::kExpand, Op::kCompress};

// Every pattern, with every dtype of values and of the dense weight, and masks of any number of bits.
inline std::vector<Case> DenseProblems(Op op, bool quick) {
  std::vector<Case> cases;
  std::mt19937 random(4321);
  std::vector<std::pair<DType, DType>> pairs;
  for (DType type : kFloats) pairs.push_back({type, type});
  if (op == Op::kExpand) {
    for (DType from : {DType::kS8, DType::kF8E4M3FN}) {
      for (DType to : {DType::kF32, DType::kBF16, DType::kF16, from}) pairs.push_back({from, to});
    }
  }
  for (const Pattern& pattern : kPatterns) {
    for (size_t p = 0; p < pairs.size(); ++p) {
      if (quick && (p + (&pattern - kPatterns)) % pairs.size() != 0) continue;
      for (int aligned = 0; aligned < 2; ++aligned) {
        Case c;
        c.op = op;
        c.pattern = pattern;
        c.left = c.values = pairs[p].first, c.result = pairs[p].second;
        c.batch = 1 + random() % 2;
        c.in_features = c.tokens = 1 + random() % 200;
        c.out_features = aligned ? 16 * (1 + random() % 20) : 1 + random() % 300;
        c.data = random() % 2 ? Data::kReal : Data::kExact;
        c.bits = static_cast<Bits>(random() % 4);
        if (!aligned && random() % 2) c.offset = 1 + random() % 7;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

inline std::vector<Case> Problems(Op op, bool quick) {
  if (op == Op::kExpand || op == Op::kCompress) return DenseProblems(op, quick);
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
  // What the feature-major kernels take: 16-bit data (float32 and int8 in spmm, too), wide columns, whole 16-byte runs
  // of tokens, aligned buffers. Of the first pattern also with tokens enough for the largest tiles of spmm, and for
  // sddmm to share them among blocks.
  for (const Pattern& pattern : kWidePatterns) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kS8}) {
      if (FormatOf(dtype).bytes != 2 && op != Op::kSpmm) continue;
      for (int64_t tokens : {8, 72, 264, 1416}) {
        if (tokens > 264 && (quick || op == Op::kSpmmT || &pattern != kWidePatterns)) continue;
        Case c;
        c.pattern = pattern;
        c.left = c.values = dtype;
        c.batch = tokens == 72 ? 2 : 1;
        c.tokens = dtype == DType::kS8 ? 2 * tokens : tokens;
        c.in_features = tokens > 264 ? 200 : quick ? 100 + random() % 300 : 300 + random() % 1000;
        c.out_features = tokens > 264 ? 1490 : 50 + random() % 200;
        if (pattern.bn == 1) c.out_features = (c.out_features + 7) / 8 * 8;
        if (tokens == 8) c.data = random() % 2 ? Data::kSpecial : Data::kReal;
        if (tokens == 264) c.bits = static_cast<Bits>(random() % 4);
        fill(c);
        cases.back().offset = 0;
        cases.back().result = random() % 2 ? (dtype == DType::kS8 ? DType::kS32 : dtype) : DType::kF32;
      }
    }
  }
  // Few tokens of so many columns that clusters of blocks, which share the reduction, take several tiles each.
  for (const Pattern& pattern : {kWidePatterns[0], kWidePatterns[10]}) {
    Case c;
    c.pattern = pattern;
    c.left = c.values = DType::kBF16;
    c.tokens = 8, c.in_features = 1024, c.out_features = 160 * pattern.bn;
    if (op == Op::kSpmm && !quick) fill(c), cases.back().offset = 0, cases.back().result = DType::kBF16;
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

}  // namespace nmsparse::check

#endif  // JAX_NMSPARSE_TESTS_NATIVE_PROBLEMS_H_
