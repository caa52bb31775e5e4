// The CPU kernels without XLA or Python, for the sanitizers: random problems in buffers of exactly the size that the
// format needs, so that one element read or written beyond them is an error.
//
// Operands are small integers, which every dtype holds exactly and whose sums stay exact, so results are compared for
// equality. With corrupt masks only the addresses are checked. Exits with 1 at the first difference.
//
//   kernels_test [problems per instruction set] [seed]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/isa.h"

namespace nmsparse {
namespace {

class ThreadParallel final : public Parallel {
 public:
  explicit ThreadParallel(int workers) : Parallel(workers) {}

 protected:
  void Run(int64_t count, Body body, void* context) override {
    std::vector<std::thread> threads;
    for (int worker = 0; worker < workers(); ++worker) {
      threads.emplace_back([=] {
        for (int64_t i = worker; i < count; i += workers()) body(context, i, worker);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

enum class Mask { kValid, kZeros, kOnes, kRandom };

int Bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kF32:
    case DType::kS32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    default:
      return 1;
  }
}

// An integer of at most 3 bits, exactly, in any dtype.
void Write(DType dtype, char* p, int value) {
  const float f = static_cast<float>(value);
  const double d = value;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  switch (dtype) {
    case DType::kF32:
      std::memcpy(p, &f, 4);
      break;
    case DType::kF64:
      std::memcpy(p, &d, 8);
      break;
    case DType::kBF16: {
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(p, &half, 2);
      break;
    }
    case DType::kF16: {
      const uint16_t half =
          value == 0 ? 0
                     : static_cast<uint16_t>((bits >> 16 & 0x8000u) | (((bits & 0x7fffffffu) >> 13) - (112u << 10)));
      std::memcpy(p, &half, 2);
      break;
    }
    default:
      *p = static_cast<char>(value);
  }
}

double Read(DType dtype, const char* p) {
  float f;
  double d;
  int32_t i;
  switch (dtype) {
    case DType::kF32:
      std::memcpy(&f, p, 4);
      return f;
    case DType::kF64:
      std::memcpy(&d, p, 8);
      return d;
    default:
      std::memcpy(&i, p, 4);
      return i;
  }
}

// Exactly as large as asked for, so that the address sanitizer sees the first byte beyond.
struct Array {
  Array(DType dtype, int64_t count)
      : dtype(dtype), count(count), data(new char[static_cast<size_t>(count * Bytes(dtype))]) {}
  void Fill(std::mt19937& random, std::vector<int>& integers) {
    integers.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      integers[static_cast<size_t>(i)] = static_cast<int>(random() % 7) - 3;
      Write(dtype, data.get() + i * Bytes(dtype), integers[static_cast<size_t>(i)]);
    }
  }
  double operator[](int64_t i) const { return Read(dtype, data.get() + i * Bytes(dtype)); }

  DType dtype;
  int64_t count;
  std::unique_ptr<char[]> data;
};

template <typename T, size_t n>
T Pick(std::mt19937& random, const T (&choices)[n]) {
  return choices[random() % n];
}

class Case {
 public:
  explicit Case(unsigned seed) : random_(seed) {
    Geometry& g = problem_.geometry;
    const struct {
      int q, units;
    } windows[] = {{16, 32}, {8, 32},  {3, 32},   {1, 32},   {31, 32},  {3, 6},
                   {1, 10},  {32, 64}, {25, 100}, {16, 128}, {127, 128}};
    const struct {
      int bk, bn;
    } blocks[] = {{1, 1}, {1, 1}, {1, 1}, {1, 4}, {1, 32}, {4, 4}, {3, 5}, {2, 1}, {16, 16}, {1, 40}, {1, 128}};
    const auto window = Pick(random_, windows);
    const auto block = Pick(random_, blocks);
    g.batch = Pick(random_, {1, 1, 1, 2, 3});
    g.tokens = Pick(random_, {0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 70, 130});
    g.in_features = Pick(random_, {1, 31, 33, 63, 65, 127, 129, 300});
    g.out_features = Pick(random_, {1, 2, 15, 31, 33, 63, 65, 127, 129, 200});
    g.q = window.q;
    g.window_units = window.units;
    g.mask_words = (window.units + 31) / 32;
    g.bk = block.bk;
    g.bn = block.bn;
    g.windows = (g.in_features + g.rows_per_window() - 1) / g.rows_per_window();
    g.out_blocks = (g.out_features + g.bn - 1) / g.bn;
    const struct {
      DType x, values;
    } types[] = {{DType::kF32, DType::kF32}, {DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16},
                 {DType::kF16, DType::kF16}, {DType::kF64, DType::kF64}, {DType::kS8, DType::kS8},
                 {DType::kF32, DType::kS8},  {DType::kBF16, DType::kS8}, {DType::kF16, DType::kS8}};
    const auto type = Pick(random_, types);
    x_type_ = type.x;
    values_type_ = type.values;
    result_type_ = type.x == DType::kS8 ? DType::kS32 : Pick(random_, {DType::kF32, DType::kF64});
    kind_ = Pick(random_, {Mask::kValid, Mask::kValid, Mask::kValid, Mask::kZeros, Mask::kOnes, Mask::kRandom});
    MakeMask();
  }

  std::string Describe() const {
    const Geometry& g = problem_.geometry;
    char text[256];
    std::snprintf(text, sizeof(text),
                  "batch %d tokens %d in %d out %d, %d of %d, block %dx%d, dtypes %d %d %d, mask %d",
                  static_cast<int>(g.batch), static_cast<int>(g.tokens), static_cast<int>(g.in_features),
                  static_cast<int>(g.out_features), g.q, g.window_units, g.bk, g.bn, static_cast<int>(x_type_),
                  static_cast<int>(values_type_), static_cast<int>(result_type_), static_cast<int>(kind_));
    return text;
  }

  // The name of the first operation that is wrong, or null.
  const char* Run(const Kernels& kernels, Parallel& parallel) {
    Geometry& g = problem_.geometry;
    Array x(x_type_, g.batch * g.tokens * g.in_features), grad(x_type_, g.batch * g.tokens * g.out_features);
    Array values(values_type_, g.batch * g.values_count());
    std::vector<int> xi, gi, vi;
    x.Fill(random_, xi);
    grad.Fill(random_, gi);
    values.Fill(random_, vi);
    Array y(result_type_, g.batch * g.tokens * g.out_features), dx(result_type_, g.batch * g.tokens * g.in_features);
    Array dv(result_type_, g.batch * g.values_count());
    problem_.x = {x.data.get(), x_type_};
    problem_.g = {grad.data.get(), x_type_};
    problem_.values = {values.data.get(), values_type_};
    problem_.mask = mask_.data();

    std::memset(y.data.get(), 0xff, static_cast<size_t>(y.count * Bytes(result_type_)));
    problem_.result = {y.data.get(), result_type_};
    if (kernels.spmm(problem_, parallel) != Status::kOk) return "spmm (status)";
    std::memset(dx.data.get(), 0xff, static_cast<size_t>(dx.count * Bytes(result_type_)));
    problem_.result = {dx.data.get(), result_type_};
    if (kernels.spmm_t(problem_, parallel) != Status::kOk) return "spmm_t (status)";
    const bool has_sddmm = x_type_ != DType::kS8;
    if (has_sddmm) {
      std::memset(dv.data.get(), 0xff, static_cast<size_t>(dv.count * Bytes(result_type_)));
      problem_.result = {dv.data.get(), result_type_};
      if (kernels.sddmm(problem_, parallel) != Status::kOk) return "sddmm (status)";
    }
    if (kind_ != Mask::kValid) return nullptr;

    std::vector<int64_t> want_y(static_cast<size_t>(y.count)), want_dx(static_cast<size_t>(dx.count));
    for (int64_t b = 0; b < g.batch; ++b) {
      for (int64_t v = 0; v < g.values_count(); ++v) {
        const int64_t c = v % g.bn, r = v / g.bn % g.bk, j = v / g.bn / g.bk % g.q;
        const int64_t index = v / g.bn / g.bk / g.q, block = index % g.out_blocks, window = index / g.out_blocks;
        const int64_t unit =
            positions_[static_cast<size_t>(((b * g.windows + window) * g.out_blocks + block) * g.q + j)];
        const int64_t row = (window * g.window_units + unit) * g.bk + r, column = block * g.bn + c;
        const bool padding = row >= g.in_features || column >= g.out_features;
        const int64_t n = b * g.values_count() + v;
        int64_t sum = 0;
        for (int64_t t = 0; t < g.tokens && !padding; ++t) {
          const int64_t x_at = (b * g.tokens + t) * g.in_features + row,
                        g_at = (b * g.tokens + t) * g.out_features + column;
          const int64_t xv = xi[static_cast<size_t>(x_at)], gv = gi[static_cast<size_t>(g_at)];
          const int64_t w = vi[static_cast<size_t>(n)];
          want_y[static_cast<size_t>(g_at)] += xv * w;
          want_dx[static_cast<size_t>(x_at)] += gv * w;
          sum += xv * gv;
        }
        if (has_sddmm && dv[n] != static_cast<double>(sum)) return "sddmm";
      }
    }
    for (int64_t i = 0; i < y.count; ++i) {
      if (y[i] != static_cast<double>(want_y[static_cast<size_t>(i)])) return "spmm";
    }
    for (int64_t i = 0; i < dx.count; ++i) {
      if (dx[i] != static_cast<double>(want_dx[static_cast<size_t>(i)])) return "spmm_t";
    }
    return nullptr;
  }

 private:
  void MakeMask() {
    const Geometry& g = problem_.geometry;
    mask_.assign(static_cast<size_t>(g.batch * g.mask_count()), kind_ == Mask::kOnes ? ~0u : 0u);
    if (kind_ == Mask::kRandom) {
      for (uint32_t& word : mask_) word = static_cast<uint32_t>(random_());
    }
    if (kind_ != Mask::kValid) return;
    for (int64_t i = 0; i < g.batch * g.windows * g.out_blocks; ++i) {
      int left = g.q;
      for (int u = 0; u < g.window_units; ++u) {
        if (static_cast<int>(random_() % static_cast<unsigned>(g.window_units - u)) >= left) continue;
        mask_[static_cast<size_t>(i * g.mask_words + u / 32)] |= 1u << (u % 32);
        positions_.push_back(u);
        --left;
      }
    }
  }

  std::mt19937 random_;
  Problem problem_;
  DType x_type_, values_type_, result_type_;
  Mask kind_;
  std::vector<uint32_t> mask_;
  std::vector<int> positions_;
};

}  // namespace
}  // namespace nmsparse

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 500;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 0;
  int run = 0;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    const nmsparse::Kernels* kernels = nmsparse::KernelsFor(isa);
    if (kernels == nullptr) {
      std::printf("%s: not on this processor\n", isa);
      continue;
    }
    for (int i = 0; i < problems; ++i, ++run) {
      nmsparse::ThreadParallel parallel(i % 3 + 1);
      nmsparse::Case problem(seed + static_cast<unsigned>(i));
      if (const char* wrong = problem.Run(*kernels, parallel)) {
        std::printf("%s: problem %u: %s is wrong: %s\n", isa, seed + static_cast<unsigned>(i), wrong,
                    problem.Describe().c_str());
        return 1;
      }
    }
    std::printf("%s: %d problems right\n", isa, problems);
  }
  return run > 0 ? 0 : 1;
}
