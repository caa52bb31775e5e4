// Checks the CUDA kernels against a float64 reference on the host, without Python or XLA, and times them.
//
//   cuda_check [--quick] [--every N] [--times] [--kernel NAME]... [--op spmm|spmm_t|sddmm|expand|compress]...
//
// Every kernel of cuda/kernels.h runs on the same problems (Problems() below): all patterns, dtype pairs and result
// dtypes, ragged sizes, tails, batches, epilogues, unaligned buffers, NaN and infinities, masks with surplus or missing
// bits. A kernel may decline a problem (cudaErrorNotSupported), but not all of them. Feature-major kernels get x and g
// and give y and dx as [batch, features, tokens]. For each problem
//   * the result, its surroundings and the workspace are poisoned with NaN first; the surroundings must stay poisoned;
//   * the launch runs twice, directly and captured into a CUDA graph: the bits must agree;
//   * where the reference is exact (data are multiples of 1/4, so every float32 sum is exact) the result must be exact.
// Exits with 0 when everything passed. --quick is a small set for compute-sanitizer; --every N gives a
// kernel its next problem only N problems after one that it took (racecheck is slow).
//
// Built by the CMake target `cuda_check`, which is not part of an ordinary build.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels.h"
#include "tests/native/problems.h"
#include "tests/native/reference.h"

namespace nmsparse::check {
namespace {

using cuda::Kernel;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "cuda_check: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}
#define CHECK(call) Check(call, #call)

// ------------------------------------------------------------------------------------------------------ the device

constexpr int64_t kGuard = 512;  // poisoned bytes on both sides of the result
constexpr int64_t kWorkspace = int64_t{64} << 20;

class Device {
 public:
  Device() {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&arena_, kSize));
    CHECK(cudaMalloc(&workspace, kWorkspace));
  }

  void Reset() { used_ = 0; }

  void* Reserve(int64_t bytes, int64_t offset = 0) {
    uint8_t* start = arena_ + used_ + offset;
    used_ += (bytes + offset + 255) / 256 * 256;
    if (used_ > kSize) {
      std::fprintf(stderr, "cuda_check: the problem is larger than the arena\n");
      std::exit(2);
    }
    return start;
  }

  void* Copy(const void* host, int64_t bytes, int64_t offset) {
    void* device = Reserve(bytes, offset);
    if (bytes) CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
    return device;
  }

  Operand Copy(const HostArray& array, int offset) {
    if (array.bytes.empty()) return {nullptr, array.dtype};
    return {Copy(array.bytes.data(), array.bytes.size(), int64_t{offset} * FormatOf(array.dtype).bytes), array.dtype};
  }

  cudaStream_t stream = nullptr;
  void* workspace = nullptr;

 private:
  static constexpr int64_t kSize = int64_t{320} << 20;
  uint8_t* arena_ = nullptr;
  int64_t used_ = 0;
};

Problem Upload(const Case& c, const Instance& s, const Kernel& kernel, Precision precision, Device& device) {
  Problem problem;
  problem.geometry = s.geometry;
  const auto copy = [&](const HostArray& array, int64_t features) {
    if (!kernel.feature_major) return device.Copy(array, c.offset);
    const HostArray transposed = FeatureMajor(array, s.geometry, features);
    const Operand operand = device.Copy(transposed, c.offset);
    CHECK(cudaStreamSynchronize(device.stream));  // `transposed` ends here
    return operand;
  };
  problem.x = copy(s.x, s.geometry.in_features);
  problem.g = copy(s.g, s.geometry.out_features);
  problem.values = device.Copy(s.values, c.offset);
  problem.mask = static_cast<const uint32_t*>(device.Copy(s.mask.data(), s.mask.size() * 4, c.offset * 4));
  if (c.scales) {
    problem.epilogue.scales =
        static_cast<const float*>(device.Copy(s.scales.data(), s.scales.size() * 4, c.offset * 4));
  }
  if (c.bias) problem.epilogue.bias = device.Copy(s.bias, c.offset);
  problem.epilogue.activation = c.activation;
  problem.result.dtype = c.result;
  problem.workspace = device.workspace;
  problem.workspace_bytes = kWorkspace;
  problem.precision = precision;
  problem.kernel = kernel.name;
  return problem;
}

void LaunchCaptured(const Kernel& kernel, const Problem& problem, int times, cudaStream_t stream,
                    cudaGraphExec_t* executable) {
  cudaGraph_t graph;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < times; ++i) CHECK(kernel.launch(problem, stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(executable, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaGraphLaunch(*executable, stream));
}

bool UsesTf32(const Case& c, const Kernel& kernel) {
  return (kernel.name == "block_mma_many" || kernel.name == "block_wgmma_rs") && c.left == DType::kF32;
}

// Bound of the error of a sum over the sum of its absolute terms.
double RoundingOf(const Case& c, const Kernel& kernel, Precision precision) {
  constexpr double kFloat32 = 2e-6, kTf32 = 0x1p-10;  // two operands of 11 significant bits
  return precision == Precision::kDefault && UsesTf32(c, kernel) ? kTf32 : kFloat32;
}

// "": passed; "-": declined; anything else: what was wrong.
std::string RunCase(const Kernel& kernel, const Case& c, const Instance& s, Precision precision, Device& device) {
  device.Reset();
  Problem problem = Upload(c, s, kernel, precision, device);
  const int element = FormatOf(c.result).bytes;
  const int64_t bytes = s.result_count * element, total = bytes + 2 * kGuard + c.offset * element;
  uint8_t* result = static_cast<uint8_t*>(device.Reserve(total));
  problem.result.data = result + kGuard + c.offset * element;
  std::vector<uint8_t> direct(total), captured(total);
  auto poison = [&] {
    CHECK(cudaMemsetAsync(result, 0xff, total, device.stream));
    CHECK(cudaMemsetAsync(device.workspace, 0xff, 1 << 16, device.stream));
  };

  poison();
  const cudaError_t status = kernel.launch(problem, device.stream);
  if (status == cudaErrorNotSupported) return "-";
  if (status != cudaSuccess) return cudaGetErrorString(status);
  CHECK(cudaMemcpyAsync(direct.data(), result, total, cudaMemcpyDeviceToHost, device.stream));
  CHECK(cudaStreamSynchronize(device.stream));
  poison();
  cudaGraphExec_t executable;
  LaunchCaptured(kernel, problem, 1, device.stream, &executable);
  CHECK(cudaMemcpyAsync(captured.data(), result, total, cudaMemcpyDeviceToHost, device.stream));
  CHECK(cudaStreamSynchronize(device.stream));
  CHECK(cudaGraphExecDestroy(executable));

  if (direct != captured) return "the captured launch gave other bits than the direct one";
  const int64_t begin = kGuard + c.offset * element;
  for (int64_t i = 0; i < total; ++i) {
    if ((i < begin || i >= begin + bytes) && direct[i] != 0xff) return "wrote outside the result";
  }
  const bool moves = c.op == Op::kExpand || c.op == Op::kCompress;
  const bool exact = moves || (c.data != Data::kReal && c.activation == Activation::kNone);
  const bool feature_major = kernel.feature_major && c.op != Op::kSddmm;  // dv has the same order for all kernels
  const int64_t features = c.op == Op::kSpmm ? s.geometry.out_features : s.geometry.in_features;
  for (int64_t i = 0; i < s.result_count; ++i) {
    const int64_t place = feature_major ? FeatureMajorIndex(i, s.geometry.tokens, features) : i;
    const uint8_t* at = direct.data() + begin + place * element;
    const double got = Decode(c.result, at), want = s.expected[i];
    // Masks of another number of bits may give other numbers ("simple", "expand" and "compress" ignore surplus bits),
    // but every element is written: no poison where data are finite. So do masks that are not 2:4 for the kernel that
    // takes nothing else.
    const bool ignores = kernel.name == "simple" || moves;
    const bool defined = c.bits == Bits::kValid || (ignores && c.bits == Bits::kSurplus);
    const bool only24 = kernel.name == "ew_sparse24" || kernel.name == "ew_wgmma_sparse24";
    const bool wrong24 = only24 && c.group != 4;
    if ((!defined || wrong24) && (!std::isnan(got) || (wrong24 && c.data == Data::kSpecial))) continue;
    // Those that expand weights multiply zeros: NaN and infinities in x may spread.
    const bool expands = kernel.name == "ew_few_tokens" || kernel.name == "ew_wgmma";
    if (expands && c.data == Data::kSpecial && std::isnan(got)) continue;
    HostArray rounded(c.result, 1);
    if (exact && std::isfinite(want)) rounded.Set(0, want);
    const double slack = RoundingOf(c, kernel, precision) * s.magnitude[i] + 1e-6 +
                         1.01 * FormatOf(c.result).epsilon * std::abs(want) +
                         (c.result == DType::kS32   ? 0.51
                          : c.result == DType::kF16 ? 0x1p-24
                                                    : 0);
    const bool good = std::isnan(want)   ? std::isnan(got)
                      : std::isinf(want) ? got == want
                      : exact            ? got == rounded.logical[0]
                                         : std::abs(got - want) <= slack;
    if (!good) {
      char text[160];
      std::snprintf(text, sizeof(text), "element %lld of %lld is %.9g, expected %.9g", static_cast<long long>(i),
                    static_cast<long long>(s.result_count), got, want);
      return text;
    }
  }
  return "";
}

// -------------------------------------------------------------------------------------------------------- timings

void Time(const Kernel& kernel, Op op, Device& device) {
  constexpr int kLaunches = 10;
  std::mt19937 random(7);
  std::vector<uint32_t> noise(int64_t{4096} * 4096);  // bits are bits: timings do not hang on the values
  for (uint32_t& word : noise) word = random() & 0x3fff3fffu;
  for (const Pattern& pattern : {Pattern{16, 32, 1, 1}, Pattern{8, 32, 1, 128}, Pattern{8, 32, 32, 32}}) {
    Case c;
    c.op = op, c.pattern = pattern, c.in_features = c.out_features = 4096;
    Instance s;
    s.mask = RandomMask(c.geometry(), Bits::kValid, 0, random);
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t tokens : {1, 16, 32, 64, 256, 4096}) {
        c.tokens = tokens;
        c.left = c.values = c.result = dtype;
        s.geometry = c.geometry();
        device.Reset();
        Problem problem = Upload(c, s, kernel, Precision::kHighest, device);
        const int64_t bytes = FormatOf(dtype).bytes;
        const Operand activations{device.Copy(noise.data(), tokens * 4096 * bytes, 0), dtype};
        const Operand others{device.Copy(noise.data(), int64_t{4096} * 4096 * bytes, 0), dtype};
        problem.x = problem.g = activations;
        if (op == Op::kSddmm) problem.g = others;
        problem.values = others;
        problem.result.data = device.Reserve(int64_t{4096} * 4096 * bytes);
        if (kernel.launch(problem, device.stream) == cudaErrorNotSupported) continue;
        cudaGraphExec_t executable;
        LaunchCaptured(kernel, problem, kLaunches, device.stream, &executable);
        cudaEvent_t start, stop;
        CHECK(cudaEventCreate(&start));
        CHECK(cudaEventCreate(&stop));
        std::vector<float> times;
        for (int i = 0; i < 5; ++i) {
          CHECK(cudaEventRecord(start, device.stream));
          CHECK(cudaGraphLaunch(executable, device.stream));
          CHECK(cudaEventRecord(stop, device.stream));
          CHECK(cudaEventSynchronize(stop));
          float milliseconds;
          CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
          times.push_back(milliseconds * 1e3f / kLaunches);
        }
        CHECK(cudaGraphExecDestroy(executable));
        std::sort(times.begin(), times.end());
        std::printf("  4096x4096 %d:%d/%dx%d %s tokens %4d %9.1f us %6.1f TFLOP/s dense-equivalent, warm L2\n",
                    pattern.q, pattern.window_units, pattern.bk, pattern.bn, FormatOf(dtype).name,
                    static_cast<int>(tokens), times[2], 2e-6 * tokens * 4096 * 4096 / times[2]);
      }
    }
  }
}

int Main(int argc, char** argv) {
  bool quick = false, times = false;
  size_t every = 1;
  std::vector<std::string> kernels, ops;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--quick") {
      quick = true;
    } else if (flag == "--times") {
      times = true;
    } else if (flag == "--every" && i + 1 < argc) {
      every = std::max(1, std::atoi(argv[++i]));
    } else if (flag == "--kernel" && i + 1 < argc) {
      kernels.push_back(argv[++i]);
    } else if (flag == "--op" && i + 1 < argc) {
      ops.push_back(argv[++i]);
    } else {
      std::fprintf(stderr,
                   "usage: cuda_check [--quick] [--every N] [--times] [--kernel NAME]... [--op "
                   "spmm|spmm_t|sddmm|expand|compress]...\n");
      return 2;
    }
  }
  auto wanted = [](const std::vector<std::string>& list, std::string_view name) {
    return list.empty() || std::find(list.begin(), list.end(), name) != list.end();
  };
  Device device;
  int failures = 0, checked = 0;
  for (Op op : kOps) {
    static const char* const kNames[] = {"spmm", "spmm_t", "sddmm", "expand", "compress"};
    const char* name = kNames[static_cast<int>(op)];
    if (!wanted(ops, name)) continue;
    const std::vector<Kernel> table =
        op == Op::kSpmm       ? std::vector(std::begin(cuda::kSpmmKernels), std::end(cuda::kSpmmKernels))
        : op == Op::kSpmmT    ? std::vector(std::begin(cuda::kSpmmTKernels), std::end(cuda::kSpmmTKernels))
        : op == Op::kExpand   ? std::vector{Kernel{"expand", cuda::Expand}}
        : op == Op::kCompress ? std::vector{Kernel{"compress", cuda::Compress}}
                              : std::vector(std::begin(cuda::kSddmmKernels), std::end(cuda::kSddmmKernels));
    std::vector<int> passed(table.size()), declined(table.size()), failed(table.size());
    std::vector<size_t> next(table.size());  // the problem from which on the kernel is asked again
    const std::vector<Case> problems = Problems(op, quick);
    // The reference takes far longer than the kernels, so it is made ahead, on all cores.
    std::deque<std::future<Instance>> ahead;
    for (size_t i = 0, made = 0; i < problems.size(); ++i) {
      for (; made < problems.size() && ahead.size() <= 2 * std::thread::hardware_concurrency(); ++made) {
        ahead.push_back(std::async(std::launch::async, [&c = problems[made], seed = made] {
          std::mt19937 random(99 + seed);
          return MakeInstance(c, random);
        }));
      }
      const Case& c = problems[i];
      const Instance instance = ahead.front().get();
      ahead.pop_front();
      for (size_t k = 0; k < table.size(); ++k) {
        if (!wanted(kernels, table[k].name) || i < next[k]) continue;
        std::string outcome = RunCase(table[k], c, instance, Precision::kHighest, device);
        if (UsesTf32(c, table[k])) {
          if (outcome != "-") outcome = "took a problem at the highest precision";
          for (Precision precision : {Precision::kDefault, Precision::kTf32x3}) {
            const std::string lower = RunCase(table[k], c, instance, precision, device);
            if (!lower.empty() || outcome == "-") outcome = lower;
          }
        }
        if (outcome != "-") next[k] = i + every;
        if (outcome.empty()) {
          ++passed[k];
        } else if (outcome == "-") {
          ++declined[k];
        } else if (++failed[k] <= 10) {
          std::printf("FAILED %s: %s: %s\n", std::string(table[k].name).c_str(), c.Describe().c_str(), outcome.c_str());
        }
      }
    }
    for (size_t k = 0; k < table.size(); ++k) {
      if (!wanted(kernels, table[k].name)) continue;
      std::printf("%s %s: %d passed, %d failed, %d declined\n", name, std::string(table[k].name).c_str(), passed[k],
                  failed[k], declined[k]);
      failures += failed[k] + (passed[k] == 0);
      checked += passed[k];
      if (times && failed[k] == 0 && op != Op::kExpand && op != Op::kCompress) Time(table[k], op, device);
    }
  }
  std::printf("cuda_check: %d passed, %d failed\n", checked, failures);
  return failures == 0 && checked > 0 ? 0 : 1;
}

}  // namespace
}  // namespace nmsparse::check

int main(int argc, char** argv) { return nmsparse::check::Main(argc, argv); }
