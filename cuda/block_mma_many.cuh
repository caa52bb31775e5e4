// Many tokens times vector-wise (1, L) or block-wise (b, b) weights on tensor cores by mma.sync, feature-major:
//
//   yᵀ[o, t] = act(scale[o] * sum_r values[r, o] xᵀ[row(r), t] + bias[o])      r: the kept rows of o's column block
//
// (kept_rows.cuh) float32 as TF32 (rounded to 11 significant bits) or as three products of TF32 halves (big big + big
// small + small big); bfloat16, float16; int8 with int32 sums. From sm_80 on.
//
// Layouts are those of kept_rows.cuh. Both operands have one line per kept row in shared memory, as they lie in memory.
// Fragments. mma wants consecutive k of one column in a register, and lines hold consecutive columns of one k. The
//   order of a sum and of columns is free: lane 4 g + t of a warp reads eight columns (or tokens) of rows t, t + 4,
//   t + 8 ... at once and transposes 4 / sizeof(T) rows of them by PRMT. Its column e of eight is row g of half e % 2
//   of the warp's 16-column tile e / 2; its token e is column g of 8-token tile e. So a lane's results are runs of
//   tokens.
// Step. kDepth kept rows (kStepBytes of k), counted over all windows. Rows that do not exist are zeros in both
//   operands.
// Ownership. A block owns kColumns x kTokens results at a time and walks such tiles with a stride of the grid; a warp
//   64 x 64 of them. Copies run ahead over the ends of tiles: results are written while the next tile arrives.
// Shared memory (bytes): kStages x kDepth x (pitches of columns and tokens); 2 x kThreads x 8 places of kept rows in x
//   and values: while the steps of one list are copied the next list is made, a row by each thread. Lines are padded
//   by 32 bytes: rows t of a fragment then lie in different banks.
// Synchronisation: cp.async groups of a step each; one barrier of the block a step.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_MMA_MANY_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_MMA_MANY_CUH_

#include "cuda/block_mma_fragments.cuh"
#include "cuda/kept_rows.cuh"

namespace nmsparse::cuda::block_mma_many {

using kept_rows::Arguments;
using kept_rows::FindKept;
using kept_rows::Kept;
using kept_rows::Place;
using kept_rows::PlaceOf;
using kept_rows::Position;
using kept_rows::SumPlainly;

inline constexpr int kWarpSide = 64;  // columns and tokens of a warp
inline constexpr int kStages = 3;

template <class T_, int kProducts_, int kColumns_, int kTokens_, int kStepBytes>
struct Config {
  using T = T_;
  using Acc = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;
  static constexpr int kProducts = kProducts_;  // of TF32, for one of float32
  static constexpr int kColumns = kColumns_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kThreads = kColumns / kWarpSide * (kTokens / kWarpSide) * kWarpSize;
  static constexpr int kDepth = kStepBytes / sizeof(T);
  static constexpr int kPiece = 16 / sizeof(T);
  static constexpr int kColumnPitch = kColumns * sizeof(T) + 32, kTokenPitch = kTokens * sizeof(T) + 32;
  static constexpr int kStageBytes = kDepth * (kColumnPitch + kTokenPitch);
  static constexpr int kListed = kThreads / kDepth;  // steps that are listed at a time, a row by each thread
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kThreads * 8;
  static_assert(kThreads % kDepth == 0 && kListed >= 2);
};

template <class C>
class Multiplier {
 public:
  using T = typename C::T;
  using Acc = typename C::Acc;

  __device__ Multiplier(const Arguments& a, unsigned char* storage)
      : a_(a),
        stages_(storage),
        lists_(reinterpret_cast<Place*>(storage + kStages * C::kStageBytes)),
        tile_(static_cast<int32_t>(blockIdx.x)),
        at_(Position<C>::At(a, tile_)) {
    const int warp = threadIdx.x / kWarpSize;
    warp_column_ = warp % (C::kColumns / kWarpSide) * kWarpSide;
    warp_token_ = warp / (C::kColumns / kWarpSide) * kWarpSide;
  }

  __device__ void Run() {
    if (a_.steps > 0) Start();
    int slot = 0;
    for (int32_t tile = blockIdx.x; tile < a_.tiles; tile += gridDim.x) {
      Acc sum[kFragment / 2][kFragment][4] = {};
      for (int step = 0; step < a_.steps; ++step) {
        block::WaitForCopies<kStages - 2>();
        __syncthreads();  // this step's lines are there for all, and nobody reads those of the step before any more
        // The list before the one that is copied from is read no more, so the next takes its place.
        const bool lists = copied_ % C::kListed == 0;
        const Kept next = lists ? FindRow(copied_ / C::kListed + 1) : Kept{};
        CopyNext();
        Multiply(stages_ + slot * C::kStageBytes, sum);
        if (lists) List(copied_ / C::kListed + 1, next);
        if (++slot == kStages) slot = 0;
      }
      Store(Position<C>::At(a_, tile), sum);
    }
    block::WaitForCopies<0>();
  }

 private:
  __device__ void Start() {
    List(0, FindRow(0));
    __syncthreads();
    for (int step = 0; step < kStages - 1; ++step) CopyNext();
    // The list that follows is made when the first step of a list has been copied: those steps are past it.
    List(1, FindRow(1));
  }

  // This thread's row of a list.
  __device__ Kept FindRow(int32_t list) const {
    const int thread = static_cast<int>(threadIdx.x);
    return FindKept<C>(a_, list * C::kListed + thread / C::kDepth, thread % C::kDepth);
  }

  __device__ void List(int32_t list, const Kept& kept) {
    lists_[list % 2 * C::kThreads + threadIdx.x] = PlaceOf(a_, kept);
  }

  // The list of the step to be copied was written before a barrier that this thread has passed.
  __device__ void CopyNext() {
    if (tile_ < a_.tiles) {
      const Geometry& g = a_.geometry;
      const Place* const list = lists_ + copied_ % (2 * C::kListed) * C::kDepth;
      const uint32_t columns = block::SharedAddress(stages_ + stage_ * C::kStageBytes);
      const uint32_t tokens = columns + C::kDepth * C::kColumnPitch;
      const T* const values =
          static_cast<const T*>(a_.values) + at_.batch * block::ValuesPerBatch(g) + at_.column % static_cast<int>(g.bn);
      const T* const x = static_cast<const T*>(a_.x) + at_.batch * g.in_features * g.tokens;
      CopyLines<C::kColumns>(columns, C::kColumnPitch, values, g.bn, C::kColumns,
                             [&](int row) { return list[row].values; });
      CopyLines<C::kTokens>(tokens, C::kTokenPitch, x + at_.token, g.tokens, g.tokens - at_.token,
                            [&](int row) { return list[row].x; });
      if (++step_ == a_.steps) {
        step_ = 0;
        tile_ += static_cast<int32_t>(gridDim.x);
        if (tile_ < a_.tiles) at_ = Position<C>::At(a_, tile_);
      }
    }
    block::CommitCopies();
    ++copied_;
    if (++stage_ == kStages) stage_ = 0;
  }

  // `length`: elements of a line that exist.
  template <int kLine, class Places>
  __device__ static void CopyLines(uint32_t to, int pitch, const T* from, int64_t stride, int64_t length,
                                   Places&& place_of) {
    constexpr int kPieces = kLine / C::kPiece;  // of a line
    static_assert(C::kDepth * kPieces % C::kThreads == 0 && C::kThreads % kPieces == 0);
    const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    const bool inside = piece * C::kPiece < length;
#pragma unroll
    for (int row = 0; row < C::kDepth; row += C::kThreads / kPieces) {
      const int32_t place = place_of(row + first);
      const bool exists = place >= 0 && inside;
      block::CopyAsync<16>(to + (row + first) * pitch + piece * 16,
                           from + (exists ? place * stride + piece * C::kPiece : 0), exists);
    }
  }

  __device__ void Multiply(const unsigned char* stage, Acc (&sum)[kFragment / 2][kFragment][4]) const {
    const unsigned char* const columns = stage + warp_column_ * sizeof(T);
    const unsigned char* const tokens = stage + C::kDepth * C::kColumnPitch + warp_token_ * sizeof(T);
#pragma unroll
    for (int first = 0; first < C::kDepth; first += kMmaRows<T>) {
      Fragment left, right;
      LoadFragment<T, C::kColumnPitch>(columns + first * C::kColumnPitch, left);
      LoadFragment<T, C::kTokenPitch>(tokens + first * C::kTokenPitch, right);
      if constexpr (C::kProducts == 3) {
        Fragment small_left, small_right;
        SplitFragment(left, small_left);
        SplitFragment(right, small_right);
        MultiplyFragments<T>(small_left, right, sum);
        MultiplyFragments<T>(left, small_right, sum);
      } else if constexpr (std::is_same_v<T, float>) {
        RoundFragment(left);
        RoundFragment(right);
      }
      MultiplyFragments<T>(left, right, sum);
    }
  }

  __device__ void Store(const Position<C>& at, Acc (&sum)[kFragment / 2][kFragment][4]) const {
    switch (a_.y.dtype) {
      case DType::kF32:
        return StoreAs<float>(at, sum);
      case DType::kBF16:
        return StoreAs<__nv_bfloat16>(at, sum);
      case DType::kF16:
        return StoreAs<__half>(at, sum);
      default:
        if constexpr (std::is_same_v<Acc, int32_t>) StoreAs<int32_t>(at, sum);
    }
  }

  template <class Out>
  __device__ void StoreAs(const Position<C>& at, Acc (&sum)[kFragment / 2][kFragment][4]) const {
    constexpr int kRun = kFragmentRun<T>;
    constexpr int kBytes = kRun * sizeof(Out);
    struct alignas(kBytes < 16 ? kBytes : 16) Results {
      Out v[kRun];
    };
    const Geometry& g = a_.geometry;
    const int group = threadIdx.x % kWarpSize / 4, lane = threadIdx.x % 4;
    const bool plain = IsIdentity(a_.epilogue);
#pragma unroll
    for (int c = 0; c < kFragment; ++c) {
      const int32_t column = at.column + warp_column_ + PlaceInWarp<T>(group, c);
      if (column >= g.out_features) continue;
      const int64_t feature = at.batch * g.out_features + column;
      const ColumnEpilogue finish(a_.epilogue, feature);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int run = 0; run < kFragment; run += kRun) {
          const int32_t token = at.token + warp_token_ + PlaceInWarp<T>(2 * lane + i, run);
          if (token >= g.tokens) continue;
          Results results;
#pragma unroll
          for (int k = 0; k < kRun; ++k) {
            Acc v = sum[c / 2][run + k][c % 2 * 2 + i];
            if constexpr (C::kProducts == 3) {
              // Infinity minus infinity, or infinity times a half that is zero: neither is of the product asked for.
              if (isnan(v)) v = SumPlainly(a_, at.batch, column, token + k);
            }
            results.v[k] = plain ? To<Out>(v) : To<Out>(finish(static_cast<float>(v)));
          }
          *reinterpret_cast<Results*>(static_cast<Out*>(a_.y.data) + feature * g.tokens + token) = results;
        }
      }
    }
  }

  const Arguments& a_;
  unsigned char* const stages_;
  Place* const lists_;
  // What is copied next: a step of a tile, to a stage; and how many steps have been copied.
  int32_t tile_, step_ = 0;
  Position<C> at_;
  int stage_ = 0;
  int32_t copied_ = 0;
  int warp_column_, warp_token_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 256 / C::kThreads) ManyTokensMma(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned char storage[];
  Multiplier<C>(a, storage).Run();
}

}  // namespace nmsparse::cuda::block_mma_many

#endif  // JAX_NMSPARSE_CUDA_BLOCK_MMA_MANY_CUH_
