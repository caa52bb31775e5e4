// Host side of the kernel checks: data of a problem and its float64 reference, which is written from the format's
// definition alone and shares no code with the kernels.
#ifndef JAX_NMSPARSE_TESTS_NATIVE_REFERENCE_H_
#define JAX_NMSPARSE_TESTS_NATIVE_REFERENCE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/problem.h"
#include "tests/native/formats.h"
#include "tests/native/problems.h"

namespace nmsparse::check {

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
  const bool gradient = c.op == Op::kSddmm || c.op == Op::kCompress;  // by the values
  if (c.op == Op::kSpmm || c.op == Op::kSddmm)
    s.x = RandomArray(c.left, g.batch * g.tokens * g.in_features, c.data, random);
  if (c.op != Op::kSpmm && c.op != Op::kExpand)
    s.g = RandomArray(c.left, g.batch * g.tokens * g.out_features, c.data, random);
  const Data value_data = c.data == Data::kSpecial ? Data::kExact : c.data;
  if (c.op == Op::kExpand || c.op == Op::kCompress) {
    s.x = HostArray(DType::kF32, g.batch * g.tokens * g.in_features);
    for (int64_t row = 0; row < g.batch * g.tokens; ++row) s.x.Set(row * g.in_features + row % g.tokens, 1.0);
  }
  if (!gradient) s.values = RandomArray(c.values, g.batch * g.values_count(), value_data, random);
  s.mask = RandomMask(g, c.bits, c.group, random);
  const int64_t features = g.batch * g.out_features;
  for (int64_t i = 0; c.scales && i < features; ++i) s.scales.push_back(std::ldexp(1.0f, random() % 3 - 1));
  if (c.bias) s.bias = RandomArray(c.bias_dtype, features, value_data, random);

  s.result_count = c.op == Op::kSpmmT ? g.batch * g.tokens * g.in_features
                   : gradient         ? g.batch * g.values_count()
                                      : g.batch * g.tokens * g.out_features;
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
            const int64_t to = c.op == Op::kSpmmT ? at_x : gradient ? v : at_g;
            const double left = c.op == Op::kSpmmT ? s.g.logical[at_g] : s.x.logical[at_x];
            const double right = gradient ? s.g.logical[at_g] : s.values.logical[v];
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
