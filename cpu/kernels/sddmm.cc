// dv = (xᵀ g) at the kept units, tokens in lanes.
//
// A task owns (batch entry, one window, chunk of blocks). For every kept weight (k, c) the products of xT[k][:] and
// gT[c][:] are summed lane by lane over a tile; a butterfly then adds up the lanes of a vector's worth of kept weights
// at once. Sums over tiles are kept in scratch memory and added in the order of the tiles.
#include "cpu/kernels/column_lanes.h"
#include "cpu/kernels/few_tokens.h"
#include "cpu/kernels/tiling.h"

namespace nmsparse {
namespace NMS_ISA {
namespace {

template <typename Acc, int vectors>
class SampledTokenLanes {
 public:
  static constexpr int kWidth = vectors * kLanes<Acc>;
  static constexpr int kLane = kLanes<Acc>;

  SampledTokenLanes(const Problem& problem, Parallel& parallel) : problem_(problem), parallel_(parallel) {
    const Geometry& geometry = problem.geometry;
    kept_ = int64_t{geometry.q} * geometry.bk;
    run_ = Max<int64_t>(1, 64 / kept_);
    // gT of a chunk and its sums stay in the second-level cache.
    const int64_t column_bytes = (kWidth + kept_) * sizeof(Acc);
    blocks_ = Max<int64_t>(1, Min((96 << 10) / (column_bytes * geometry.bn), geometry.out_blocks));
    sums_bytes_ = RoundUp((blocks_ * geometry.bn * kept_ + kLane) * sizeof(Acc), 64);
    products_bytes_ = RoundUp((run_ * kept_ + kLane) * kLane * sizeof(Acc), 64);
    scratch_bytes_ = RoundUp(sums_bytes_ + products_bytes_ + (kept_ + 64) * sizeof(uint32_t), 64);
  }

  Status Run() {
    const Geometry& geometry = problem_.geometry;
    const int64_t chunks = CeilDiv(geometry.out_blocks, blocks_);
    for (int64_t b = 0; b < geometry.batch; ++b) {
      const Round round{b, 1, 0, geometry.tokens};
      Tiles<Acc> x(round, geometry.windows * geometry.rows_per_window(), kWidth);
      Tiles<Acc> g(round, geometry.out_blocks * geometry.bn, kWidth);
      Scratch scratch(scratch_bytes_ * parallel_.workers());
      if (!x || !g || !scratch) return Status::kNoMemory;
      x.Fill(geometry, problem_.x, geometry.in_features, parallel_);
      g.Fill(geometry, problem_.g, geometry.out_features, parallel_);
      parallel_.For(geometry.windows * chunks, [&](int64_t task, int worker) {
        Chunk(b, x, g, task / chunks, task % chunks * blocks_, scratch.bytes() + worker * scratch_bytes_);
      });
    }
    return Status::kOk;
  }

 private:
  void Chunk(int64_t batch, const Tiles<Acc>& x, const Tiles<Acc>& g, int64_t window, int64_t first,
             char* scratch) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t last = Min(first + blocks_, geometry.out_blocks), bn = geometry.bn;
    Acc* sums = reinterpret_cast<Acc*>(scratch);
    Acc* products = reinterpret_cast<Acc*>(scratch + sums_bytes_);
    uint32_t* offsets = reinterpret_cast<uint32_t*>(scratch + sums_bytes_ + products_bytes_);
    // Only the mask is read.
    Packer<Acc, Acc> packer(geometry, nullptr, problem_.mask + batch * geometry.mask_count(), kWidth);
    packer.SetWindows(window, 1);
    std::memset(sums, 0, static_cast<size_t>(sums_bytes_));
    const bool elementwise = IsElementwise(geometry);
    const uint32_t window_mask = WindowMask(geometry);
    const uint32_t* mask = problem_.mask + batch * geometry.mask_count() + window * geometry.out_blocks;
    for (int64_t tile = 0; tile < x.count(); ++tile) {
      const Acc* rows = x.tile(0, tile) + window * geometry.rows_per_window() * kWidth;
      const Acc* columns = g.tile(0, tile);
      // A few columns' products at a time: their kept weights together fill whole vectors for the butterfly.
      for (int64_t c = first * bn, done = 0; c < last * bn; c += run_, done += run_ * kept_) {
        const int64_t count = Min(run_, last * bn - c);
        for (int64_t i = 0; i < count; ++i) {
          const Acc* column = columns + (c + i) * kWidth;
          if (elementwise) {
            const uint32_t bits = KeptBits(mask[c + i], window_mask, geometry.window_units, geometry.q);
            MultiplyBits(rows, bits, column, products + i * kept_ * kLane);
          } else {
            if ((c + i) % bn == 0 || i == 0) packer.Offsets((c + i) / bn, offsets);
            Multiply(rows, offsets, column, products + i * kept_ * kLane);
          }
        }
        AddUp(products, count * kept_, sums + done);
      }
    }
    for (int64_t block = first; block < last; ++block) {
      if (!elementwise || IsRagged(window)) packer.Offsets(block, offsets);
      Finish(batch, window, block, offsets, sums + (block - first) * bn * kept_);
    }
  }

  bool IsRagged(int64_t window) const {
    const Geometry& geometry = problem_.geometry;
    return (window + 1) * geometry.rows_per_window() > geometry.in_features;
  }

  // Adds the products of column g with the kept rows, lane by lane, to `products` [kept][lanes].
  NMS_INLINE void Multiply(const Acc* x, const uint32_t* offsets, const Acc* g, Acc* products) const {
    Vec<Acc> column[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) column[v] = Load(g + v * kLane);
    for (int64_t i = 0; i < kept_; ++i) {
      const Acc* row = x + offsets[i];
      Vec<Acc> sum = Load(row) * column[0];
#pragma GCC unroll 8
      for (int v = 1; v < vectors; ++v) sum += Load(row + v * kLane) * column[v];
      Store(products + i * kLane, sum);
    }
  }

  // The same for an element-wise weight, its positions taken from the mask's bits.
  NMS_INLINE void MultiplyBits(const Acc* x, uint32_t bits, const Acc* g, Acc* products) const {
    Vec<Acc> column[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) column[v] = Load(g + v * kLane);
    for (int64_t i = 0; i < kept_; ++i) {
      const Acc* row = x + static_cast<uint32_t>(__builtin_ctz(bits)) * kWidth;
      bits &= bits - 1;
      Vec<Acc> sum = Load(row) * column[0];
#pragma GCC unroll 8
      for (int v = 1; v < vectors; ++v) sum += Load(row + v * kLane) * column[v];
      Store(products + i * kLane, sum);
    }
  }

  // sums[i] += all lanes of products[i].
  NMS_INLINE void AddUp(const Acc* products, int64_t count, Acc* sums) const {
    for (int64_t i = 0; i < count; i += kLane) {
      Vec<Acc> rows[kLane];
#pragma GCC unroll 16
      for (int l = 0; l < kLane; ++l) rows[l] = Load(products + (i + l) * kLane);
      StoreFirst(sums + i, Load(sums + i) + SumLanes<Acc>(rows), count - i);
    }
  }

  // Sums [bn][row] -> dv [q * bk][bn]; zero at padding, whatever x and g hold (0 * Inf is not zero).
  void Finish(int64_t batch, int64_t window, int64_t block, const uint32_t* offsets, Acc* sums) const {
    const Geometry& geometry = problem_.geometry;
    const int64_t bn = geometry.bn;
    const int64_t columns = Min(geometry.out_features - block * bn, bn);
    const int64_t rows = geometry.in_features - window * geometry.rows_per_window();
    const int64_t index = batch * geometry.values_count() + (window * geometry.out_blocks + block) * kept_ * bn;
    const bool ragged = IsRagged(window);
    for (int64_t c = 0; (ragged || columns < bn) && c < bn; ++c) {
      for (int64_t i = 0; i < kept_; ++i) {
        if (c >= columns || (ragged && offsets[i] / kWidth >= rows)) sums[c * kept_ + i] = 0;
      }
    }
    if (bn == 1) {
      for (int64_t i = 0; i < kept_; i += kLane) StoreAs<Acc>(problem_.result, index + i, Load(sums + i), kept_ - i);
      return;
    }
    for (int64_t i = 0; i < kept_; ++i) {
      for (int64_t c = 0; c < bn; c += kLane) {
        Vec<Acc> v{};
        for (int64_t l = 0; l < kLane && c + l < bn; ++l) v[l] = sums[(c + l) * kept_ + i];
        StoreAs<Acc>(problem_.result, index + i * bn + c, v, bn - c);
      }
    }
  }

  const Problem& problem_;
  Parallel& parallel_;
  int64_t kept_, run_, blocks_, sums_bytes_, products_bytes_, scratch_bytes_;
};

template <typename Acc>
Status RunSddmm(const Problem& problem, Parallel& parallel) {
  const int64_t vectors = CeilDiv(problem.geometry.tokens, kLanes<Acc>);
  if (vectors <= 1) return SampledTokenLanes<Acc, 1>(problem, parallel).Run();
  if (vectors == 2) return SampledTokenLanes<Acc, 2>(problem, parallel).Run();
  if (vectors <= 4) return SampledTokenLanes<Acc, 4>(problem, parallel).Run();
  return SampledTokenLanes<Acc, 8>(problem, parallel).Run();
}

}  // namespace

Status Sddmm(const Problem& problem, Parallel& parallel) {
  const DType dtype = problem.x.dtype;
  if (!IsResult(problem.result.dtype) || problem.g.dtype != dtype) return Status::kUnsupported;
  if (dtype == DType::kS8) return Status::kUnsupported;
  for (const auto special : {SddmmFewTokens, SddmmColumnLanes}) {
    if (const Status status = special(problem, parallel); status != Status::kUnsupported) return status;
  }
  if (dtype == DType::kF64) return RunSddmm<double>(problem, parallel);
  if (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16) return RunSddmm<float>(problem, parallel);
  return Status::kUnsupported;
}

}  // namespace NMS_ISA
}  // namespace nmsparse
