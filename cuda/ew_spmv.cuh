// One to four tokens, element-wise weights: bytes decide, so CUDA cores multiply per kept element.
//
//   y[token, c] = sum over windows w, kept rows k of (w, c):  x[token, 32 w + k] * value
//
// A lane owns a column, or kLaneColumns neighbouring ones where q * size is too small for wide loads. It walks the set
// bits of the column's mask word and reads x[k] from shared memory: the 32 words of a window are the 32 banks, so lanes
// at different k meet different banks and lanes at the same k share one read. The walk starts at both ends of the word
// at once (two short dependent chains instead of one long one).
//
// Layouts. values [windows, out_features, q]: a lane reads the q * size contiguous bytes of its column, aligned by
// construction to the largest power of two in them (out_features a multiple of kLaneColumns); the columns of a warp are
// one contiguous run. mask [windows, out_features]. A block owns 32 * kLaneColumns columns and one of `gridDim.y` equal
// shares of the windows; its warps take the windows in turn, kUnroll at a time, and ask for the next ones before they
// multiply: about 75 KB per multiprocessor must be in flight to fill the memory.
//
// Shared memory, bytes:
//   0     16                        zeros before x, so that the position -1 of a corrupt mask stays inside
//   16    4 * kTokens * rows        x of the chunk of windows at hand, as accumulators, [token][row]
//   then  4 * kWarps * kTokens * kColumns partial sums
// Synchronisation: one barrier after x is staged (the first weights are then on their way already), two per further
// chunk, one before the sums are added, over warps and then over the blocks of the cluster, in ascending order.
#ifndef JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
#define JAX_NMSPARSE_CUDA_EW_SPMV_CUH_

#include "cuda/ew_kept.cuh"
#include "cuda/stage_rows.cuh"

namespace nmsparse::cuda::ew {

// kQ = 0: q is known at run time only.
template <class Value_, class Acc_, int kQ_, int kTokens_, int kWarps_, int kUnroll_, int kLaneColumns_ = 1>
struct SpmvConfig {
  using Value = Value_;
  using Acc = Acc_;
  static constexpr int kQ = kQ_, kTokens = kTokens_, kWarps = kWarps_, kUnroll = kUnroll_;
  static constexpr int kLaneColumns = kLaneColumns_;
  static constexpr int kColumns = kWarpSize * kLaneColumns;
  static constexpr int kLead = 16;
  static constexpr int kSumsBytes = 4 * kWarps * kTokens * kColumns;
  static_assert(sizeof(Acc) == 4, "x is staged as one bank word per row");
  static_assert(kTokens * kColumns <= kWarps * kWarpSize, "a thread adds up one result at the end");
  static_assert(kQ > 0 || kLaneColumns == 1, "a q known at run time is walked column by column");

  static __host__ __device__ int64_t SharedBytes(int64_t chunk_windows) {
    return kLead + int64_t{4} * kTokens * kWindow * chunk_windows + kSumsBytes;
  }
};

struct SpmvPlan {
  int32_t split_windows;  // windows per block
  int32_t chunk_windows;  // of which x is staged at a time
};

// x in shared memory, [token][stride].
template <class Acc, int kTokens>
struct RowsByToken {
  const Acc* x;
  int64_t stride;

  __device__ __forceinline__ void AddRow(Acc weight, int row, Acc (&sum)[kTokens]) const {
#pragma unroll
    for (int token = 0; token < kTokens; ++token) sum[token] += weight * x[token * stride + row];
  }
};

// The kept values of a lane's columns in one window times its rows: each column's from both ends of its mask word, in
// two chains of additions. rows.AddRow(weight, row, sum) adds a product for every token.
template <class C, class Columns, class Bits, class Rows>
__device__ __forceinline__ void MultiplyColumns(Columns& kept, const Bits& bits, const Rows& rows,
                                                typename C::Acc (&high)[C::kLaneColumns][C::kTokens],
                                                typename C::Acc (&low)[C::kLaneColumns][C::kTokens]) {
  using Acc = typename C::Acc;
  kept.Prepare();
#pragma unroll
  for (int c = 0; c < C::kLaneColumns; ++c) {
    uint32_t set = bits.words[c], reversed = __brev(set);
#pragma unroll
    for (int j = 0; j < (C::kQ + 1) / 2; ++j) {
      const int top = HighestBit(set);
      set ^= Bit(top);
      rows.AddRow(kept.template At<Acc>((c + 1) * C::kQ - 1 - j), top, high[c]);
      if (j < C::kQ / 2) {
        const int bottom = LeadingZeros(reversed);
        reversed ^= BitFromTop(bottom);
        rows.AddRow(kept.template At<Acc>(c * C::kQ + j), bottom, low[c]);
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kWarpSize* C::kWarps, C::kQ > 0 && C::kWarps * C::kTokens <= 8 ? 4 : 1)
    SpmvKernel(const __grid_constant__ Problem problem, const SpmvPlan plan) {
  using Value = typename C::Value;
  using Acc = typename C::Acc;
  extern __shared__ __align__(16) char shared[];
  const Geometry& geometry = problem.geometry;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t out = geometry.out_features, batch = blockIdx.z;
  const int64_t first_column = int64_t{blockIdx.x} * C::kColumns;
  const int first = blockIdx.y * plan.split_windows;
  const int last = static_cast<int>(min(int64_t{first} + plan.split_windows, geometry.windows));
  const int q = C::kQ > 0 ? C::kQ : geometry.q;

  // Columns beyond the last are read as the last ones and not stored.
  const int64_t column = min(first_column + lane * C::kLaneColumns, out - C::kLaneColumns);
  const int64_t origin = (batch * geometry.windows + first + warp) * out + column;
  const uint32_t* mask = problem.mask + origin;
  const char* values = static_cast<const char*>(problem.values.data) + origin * q * sizeof(Value);
  const int64_t mask_step = C::kWarps * out, values_step = mask_step * q * static_cast<int64_t>(sizeof(Value));

  using Columns = KeptColumn<Value, C::kQ == 0 ? 1 : C::kQ * C::kLaneColumns>;
  using Bits = KeptColumn<float, C::kLaneColumns>;  // words
  Columns next[C::kUnroll];
  Bits next_bits[C::kUnroll];
  const char* next_values[C::kUnroll];  // kQ = 0: read when multiplied
  auto load = [&](int window) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) {
      if (window + u * C::kWarps < last) {
        next_bits[u].template Load<true>([&](int offset) { return reinterpret_cast<const char*>(mask) + offset; });
        if constexpr (C::kQ > 0) {
          next[u].template Load<true>([&](int offset) { return values + offset; });
        } else {
          next_values[u] = values;
        }
      }
      mask += mask_step;
      values += values_step;
    }
  };
  int window = first + warp;
  load(window);

  Acc* x = reinterpret_cast<Acc*>(shared + C::kLead);
  const int64_t stride = int64_t{plan.chunk_windows} * kWindow;
  Acc* sums = x + C::kTokens * stride;
  if (threadIdx.x < C::kLead / 4) reinterpret_cast<Acc*>(shared)[threadIdx.x] = 0;

  Acc high[C::kLaneColumns][C::kTokens] = {}, low[C::kLaneColumns][C::kTokens] = {};
  for (int chunk = first; chunk < last; chunk += plan.chunk_windows) {
    const int chunk_end = min(chunk + plan.chunk_windows, last);
    if (chunk != first) __syncthreads();
    StageRows<C>(problem, batch, int64_t{chunk} * kWindow, (chunk_end - chunk) * kWindow, stride, x);
    __syncthreads();

    // The plan makes chunks whole numbers of kWarps * kUnroll windows, but for the last.
    for (; window < chunk_end; window += C::kWarps * C::kUnroll) {
      Columns kept[C::kUnroll];
      Bits bits[C::kUnroll];
      const char* kept_values[C::kUnroll];
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) kept[u] = next[u], bits[u] = next_bits[u], kept_values[u] = next_values[u];
      load(window + C::kWarps * C::kUnroll);
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        if (window + u * C::kWarps >= last) break;
        const RowsByToken<Acc, C::kTokens> rows{x + (window + u * C::kWarps - chunk) * kWindow, stride};
        if constexpr (C::kQ > 0) {
          MultiplyColumns<C>(kept[u], bits[u], rows, high, low);
        } else {
          const Value* column_values = reinterpret_cast<const Value*>(kept_values[u]);
          uint32_t set = bits[u].words[0];
#pragma unroll 4
          for (int j = q - 1; j >= 0; --j) {
            const int top = HighestBit(set);
            set ^= Bit(top);
            rows.AddRow(ToAccumulator<Acc>(column_values[j]), top, high[0]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int token = 0; token < C::kTokens; ++token) {
#pragma unroll
    for (int c = 0; c < C::kLaneColumns; ++c) {
      sums[(warp * C::kTokens + token) * C::kColumns + lane * C::kLaneColumns + c] = high[c][token] + low[c][token];
    }
  }
  __syncthreads();
  constexpr int kResults = C::kTokens * C::kColumns;
  const int result = threadIdx.x;  // token * kColumns + column of the block
  Acc total = 0;
  if (result < kResults) {
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) total += sums[i * kResults + result];
  }
  if (gridDim.y > 1) {
    if (result < kResults) sums[result] = total;  // of warp 0, which this thread alone reads
    ClusterArrive();
    ClusterWait();
    if (result < kResults && blockIdx.y == 0) {
      total = 0;
      for (uint32_t rank = 0; rank < gridDim.y; ++rank) {
        const uint32_t word = LoadFromCluster(SharedAddress(sums + result), rank);
        Acc part;
        memcpy(&part, &word, 4);
        total += part;
      }
    }
    ClusterArrive();
    ClusterWait();  // no block leaves while another may read its sums
  }
  const int64_t token = result / C::kColumns, feature = first_column + result % C::kColumns;
  if (blockIdx.y == 0 && result < kResults && token < geometry.tokens && feature < out) {
    StoreOutput(problem, (batch * geometry.tokens + token) * out + feature, batch * out + feature, total);
  }
}

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_SPMV_CUH_
