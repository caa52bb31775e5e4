// Many tokens times vector-wise (1, L) or block-wise (b, b) weights on Hopper's tensor cores, for operands that wgmma
// takes with k contiguous only (kept_rows.cuh has the equation and the layouts, in which tokens and columns are):
// float32 as TF32 (rounded to 11 significant bits) or as three products of TF32 halves (big big + big small + small
// big), and int8 with int32 sums.
//
// x is the M operand, in registers: as it lies in memory, a line of tokens per kept row, producers copy it to shared
//   memory (float32 by bulk copies, a line each), and consumers read it in fragments. The order of tokens is free: lane
//   4 g + t of a warp reads four neighbours, which are rows g and g + 8 of two products, so its results are runs of
//   four tokens.
// The weights are the N operand, in shared memory: producers copy them as they come, two steps ahead, then transpose
//   them in registers, round or split them, and write lines of k.
// Step. kDepth kept rows (128 bytes of k), counted over all windows. Rows that do not exist are zeros in both operands.
// Ownership. A block (one per multiprocessor, persistent) owns a tile of kColumns x 256 tokens at a time, each of two
//   consumer warpgroups 128 tokens of it. Two more warpgroups produce. Steps run ahead over the ends of tiles.
// Shared memory (bytes): ring of slots, in each kParts x kColumns x 128 of weights, then the lines of x, 32 bytes of
//   padding after each that share a register, so that rows t of a fragment fall into different banks; places of 4 x 256
//   kept rows in x and in the values, 4 bytes each; three steps of weights as they come; barriers, 2 x 8 a slot.
// Synchronisation. full[slot]: 256 producers have arrived twice, with the weights and after their copies of x.
//   empty[slot]: the 256 threads of the consumers have read their x, and their products are done. Producers wait for
//   their copies of weights by groups, one of each step; named barrier 1, once a step, orders what they share: weights
//   as they come, and lists.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_WGMMA_RS_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_WGMMA_RS_CUH_

#include "cuda/kept_rows.cuh"
#include "cuda/tf32.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma_k_major.cuh"

namespace nmsparse::cuda::block_wgmma_rs {

using kept_rows::Arguments;
using kept_rows::Kept;
using kept_rows::Place;
using kept_rows::Position;

template <class T_, int kProducts_, int kColumns_>
struct Config {
  using T = T_;
  using Acc = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;
  static constexpr int kProducts = kProducts_;  // of TF32, for one of float32
  static constexpr int kParts = kProducts == 3 ? 2 : 1;
  static constexpr int kColumns = kColumns_;
  static constexpr int kTokens = 256;
  static constexpr int kConsumers = 2;
  static constexpr int kTiles = kTokens / kConsumers / kMmaRows;  // products of a consumer that share weights
  static constexpr int kProducers = 2;                            // warpgroups too
  static constexpr int kProducerThreads = kProducers * kWarpgroupSize;
  static constexpr int kThreads = kConsumers * kWarpgroupSize + kProducerThreads;
  static constexpr int kProducerRegisters = kProducts == 3 ? 56 : 64;
  static constexpr int kConsumerRegisters = 256 - kProducerRegisters;
  static constexpr int kDepth = kLineBytes / sizeof(T);
  static constexpr int kPacked = 4 / sizeof(T);  // rows of k that share a register
  static constexpr int kRowBytes = kTokens * sizeof(T);
  static constexpr int kPackedBytes = kPacked * kRowBytes + 32;
  static constexpr int kInputBytes = kDepth / kPacked * kPackedBytes;
  static constexpr int kWeightBytes = kColumns * kLineBytes;
  static constexpr int kStageBytes = kParts * kWeightBytes + kInputBytes;
  static constexpr int kListed = kProducerThreads / kDepth;  // steps of a list, a row by each producer
  static constexpr int kLists = 4;
  static constexpr int kFixedBytes = 2 * kLists * kProducerThreads * 4;
  static constexpr int kScratches = 3;  // steps of weights as they come
  static constexpr int kScratchBytes = kScratches * kWeightBytes;
  static constexpr int kSlots = (kHopperSharedBytes - kFixedBytes - kScratchBytes) / (kStageBytes + 16);
  static constexpr int kSharedBytes = kSlots * (kStageBytes + 16) + kFixedBytes + kScratchBytes;
  static_assert(kStageBytes % 1024 == 0, "lines are swizzled by the bits of their address");
  static_assert(kConsumers * kConsumerRegisters + kProducers * kProducerRegisters <= 4 * 128,
                "the warpgroups share what the block was launched with, 128 registers a thread");
};

template <class C>
struct Shared {
  uint32_t base;

  // Where kept row `row` of a step lies in the lines of x.
  __device__ static constexpr int RowOffset(int row) {
    return row / C::kPacked * C::kPackedBytes + row % C::kPacked * C::kRowBytes;
  }
  __device__ uint32_t Weights(int slot, int part) const {
    return base + slot * C::kStageBytes + part * C::kWeightBytes;
  }
  __device__ uint32_t Inputs(int slot) const { return Weights(slot, C::kParts); }
  // Aligned, so that pieces of a line can be permuted by their address.
  __device__ uint32_t Scratch() const { return base + C::kSlots * C::kStageBytes; }
  __device__ uint32_t Full(int slot) const { return Scratch() + C::kScratchBytes + slot * 8; }
  __device__ uint32_t Empty(int slot) const { return Full(C::kSlots + slot); }
  __device__ int32_t* Lists(unsigned char* storage) const {
    return reinterpret_cast<int32_t*>(storage + C::kSlots * (C::kStageBytes + 16) + C::kScratchBytes);
  }
};

// The steps of this block, tile after tile.
template <class C>
class Walk {
 public:
  __device__ explicit Walk(const Arguments& a) : a_(a), tile_(static_cast<int32_t>(blockIdx.x)) { Start(); }

  __device__ bool Ended() const { return tile_ >= a_.tiles; }
  __device__ const Position<C>& at() const { return at_; }
  __device__ int step() const { return step_; }
  // Whether a new tile begins (or the last has ended).
  __device__ bool Next() {
    if (++step_ < a_.steps) return false;
    step_ = 0;
    tile_ += static_cast<int32_t>(gridDim.x);
    Start();
    return true;
  }

 private:
  __device__ void Start() {
    if (!Ended()) at_ = Position<C>::At(a_, tile_);
  }

  const Arguments& a_;
  int32_t tile_, step_ = 0;
  Position<C> at_;
};

// Of the weights of a step a thread copies pieces of 16 bytes of columns, as they lie in memory, and later takes pieces
// of 16 bytes of k (piece threadIdx.x % 8 of a line) of kGroup neighbouring columns at a time, which it transposes.
// Eight neighbouring threads copy one row and read and write different banks. Of x, every eighth thread copies a line
// of float32, where a line of int8 is too short for the copy engine: there a thread copies one piece of 16 bytes of
// kCopies consecutive lines.
template <class C>
class Producer {
 public:
  using T = typename C::T;
  static constexpr int kRows = 16 / sizeof(T);  // of k that a thread transposes; columns of a piece as it comes
  static constexpr int kPieces = kLineBytes / 16;
  static constexpr int kLinePieces = C::kRowBytes / 16;                         // of x
  using Group = std::conditional_t<std::is_same_v<T, float>, uint4, uint32_t>;  // neighbouring columns of a row
  static constexpr int kGroup = sizeof(Group) / sizeof(T);
  static_assert(C::kColumns <= C::kProducerThreads / kPieces * kGroup, "each thread transposes one group at most");

  __device__ Producer(const Arguments& a, const Shared<C>& shared, int32_t* lists)
      : a_(a),
        shared_(shared),
        x_places_(lists),
        value_places_(lists + C::kLists * C::kProducerThreads),
        thread_(static_cast<int>(threadIdx.x) - C::kConsumers * kWarpgroupSize),
        column_(thread_ / kPieces * kGroup),
        copied_(shared.Scratch() + Scratch(thread_ / kRowPieces, thread_ % kRowPieces * kRows)),
        read_(shared.Scratch() + Scratch(thread_ % kPieces * kRows, column_)),
        written_(column_ * kLineBytes + (thread_ % kPieces ^ column_ % 8) * 16),
        copies_(a),
        loads_(a),
        rows_(a) {}

  __device__ void Run() {
    if (a_.steps == 0) return;
    StartCopies();
    StartLoads();
    for (int i = 0; i < thread_ / C::kDepth; ++i) rows_.Next();
    kept_ = FindRow();
    for (int list = 0; list * C::kListed <= kAhead; ++list) List(list);
    NamedBarrier(kBarrier, C::kProducerThreads);
    for (int step = 0; step < kAhead; ++step) CopyWeights(step, step);
    for (int step = 0; !copies_.Ended(); ++step) Produce(step);
    block::WaitForCopies<0>();
  }

 private:
  static constexpr int kBarrier = 1;
  static constexpr int kAhead = C::kScratches - 1;  // steps by which weights are copied ahead of their transposition
  static constexpr int kRowPieces = C::kColumns / kRows;  // of a row of weights, as it comes
  static constexpr int kPermuted = kRowPieces < kPieces ? kRowPieces : kPieces;
  static constexpr int kRowBytes = C::kColumns * sizeof(T);

  // Where columns from `column` on of a row of a step's weights are kept as they came: pieces of rows that are
  // transposed by neighbouring threads are permuted, so that these read different banks.
  __device__ static uint32_t Scratch(int row, int column) {
    return row * kRowBytes + (column / kRows ^ row / kRows % kPermuted) * 16 + column % kRows * sizeof(T);
  }

  // The row that this thread lists next, of the step where rows_ stands.
  __device__ Kept FindRow() const {
    const int32_t position = rows_.step() * C::kDepth + thread_ % C::kDepth;
    if (rows_.Ended() || position >= a_.all_kept) return {};
    return kept_rows::KeptAt(a_, rows_.at(), position);
  }
  // Writes the list that was looked up, looks up the next.
  __device__ void List(int list) {
    const Place place = kept_rows::PlaceOf(a_, kept_);
    const int at = list % C::kLists * C::kProducerThreads + thread_;
    x_places_[at] = place.x, value_places_[at] = place.values;
    for (int i = 0; i < C::kListed; ++i) rows_.Next();
    kept_ = FindRow();
  }
  // 0 of rows that do not exist.
  __device__ static uint64_t RowOffset(int32_t place, int32_t pitch) {
    return uint64_t{static_cast<uint32_t>(max(place, 0))} * static_cast<uint32_t>(pitch);
  }
  __device__ static int ListOf(int step) { return step % (C::kLists * C::kListed) * C::kDepth; }

  // What copies need to know of their tile.
  __device__ void StartCopies() {
    if (copies_.Ended()) return;
    const Geometry& g = a_.geometry;
    const Position<C>& at = copies_.at();
    const int element = std::is_same_v<T, float> ? 0 : thread_ % kLinePieces * kRows;
    x_ = static_cast<const char*>(a_.x) + (at.batch * g.in_features * g.tokens + at.token + element) * sizeof(T);
    const int64_t left = g.tokens - at.token - element;
    x_bytes_ = std::is_same_v<T, float> ? static_cast<uint32_t>(min(int64_t{C::kTokens}, left) * sizeof(T))
               : left > 0               ? 16
                                        : 0;
  }
  __device__ void StartLoads() {
    if (loads_.Ended()) return;
    const Position<C>& at = loads_.at();
    const int64_t first = at.batch * block::ValuesPerBatch(a_.geometry) + at.column % static_cast<int>(a_.geometry.bn) +
                          thread_ % kRowPieces * kRows;
    values_ = static_cast<const char*>(a_.values) + first * sizeof(T);
  }

  __device__ void Produce(int step) {
    BarrierWait(shared_.Empty(at_.slot), at_.parity ^ 1);
    const uint32_t full = shared_.Full(at_.slot);
    if constexpr (std::is_same_v<T, float>) {
      CopyLine(x_places_ + ListOf(step), full);
    } else {
      CopyPieces(x_places_ + ListOf(step));
      BarrierArriveAfterCopies(full);
    }
    if (copies_.Next()) StartCopies();
    block::WaitForCopies<kAhead - 1>();
    // The step's weights have landed, those of the step before are transposed, and the list of the next is whole.
    NamedBarrier(kBarrier, C::kProducerThreads);
    CopyWeights(step + kAhead, scratch_ == 0 ? C::kScratches - 1 : scratch_ - 1);
    if ((step + kAhead + 1) % C::kListed == 0) List((step + kAhead + 1) / C::kListed);
    if (column_ < C::kColumns) Transpose();
    BarrierArrive(full);
    at_.Advance(C::kSlots);
    scratch_ = scratch_ == C::kScratches - 1 ? 0 : scratch_ + 1;
  }

  // A line of x by every eighth thread. Tokens beyond the last are left as they are: nobody stores their results.
  __device__ void CopyLine(const int32_t* places, uint32_t full) const {
    constexpr int kThreadsPerLine = C::kProducerThreads / C::kDepth;
    if (thread_ % kThreadsPerLine != 0) return BarrierArrive(full);
    const int row = thread_ / kThreadsPerLine;
    const int32_t place = places[row];
    const uint32_t line = shared_.Inputs(at_.slot) + Shared<C>::RowOffset(row);
    if (place < 0) {
#pragma unroll 4
      for (int i = 0; i < C::kRowBytes; i += 16) StoreShared16(line + i, uint4{});
      return BarrierArrive(full);
    }
    BarrierArriveExpect(full, x_bytes_);
    LoadBytes(line, x_ + RowOffset(place, a_.x_pitch), x_bytes_, full);
  }

  __device__ void CopyPieces(const int32_t* places) const {
    constexpr int kCopies = C::kDepth * kLinePieces / C::kProducerThreads;
    static_assert(kCopies % 4 == 0, "places are read four at a time");
    const int first = thread_ / kLinePieces * kCopies;
    const uint32_t to = shared_.Inputs(at_.slot) + Shared<C>::RowOffset(first) + thread_ % kLinePieces * 16;
#pragma unroll
    for (int row = 0; row < kCopies; row += 4) {
      const int4 four = *reinterpret_cast<const int4*>(places + first + row);
      const int32_t place[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        CopyAsync16(to + Shared<C>::RowOffset(row + i), x_ + RowOffset(place[i], a_.x_pitch),
                    place[i] >= 0 ? x_bytes_ : 0);
      }
    }
  }

  // A group of copies of its own, to one of the kScratches.
  __device__ void CopyWeights(int step, int scratch) {
    constexpr int kCopies = C::kDepth * kRowPieces / C::kProducerThreads, kRowsApart = C::kProducerThreads / kRowPieces;
    static_assert(kRowsApart % kRows == 0 && kRowsApart * kCopies == C::kDepth,
                  "threads copy the same number of pieces");
    if (!loads_.Ended()) {
      const int32_t* const places = value_places_ + ListOf(step) + thread_ / kRowPieces;
      const uint32_t to = copied_ + scratch * C::kWeightBytes;
      int32_t place[kCopies];  // read before the first copy: reads do not move over copies
#pragma unroll
      for (int i = 0; i < kCopies; ++i) place[i] = places[i * kRowsApart];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        // As Scratch(): the permutation of rows kRowsApart further on touches other bits than that of the first.
        const uint32_t row = (to ^ i * kRowsApart / kRows % kPermuted * 16) + i * kRowsApart * kRowBytes;
        CopyAsync16(row, values_ + RowOffset(place[i], a_.values_pitch), place[i] >= 0 ? 16 : 0);
      }
      if (loads_.Next()) StartLoads();
    }
    block::CommitCopies();
  }

  __device__ static void Read(uint32_t from, uint4& to) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "r"(from)
                 : "memory");
  }
  __device__ static void Read(uint32_t from, uint32_t& to) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
  }

  __device__ void Transpose() const {
    const uint32_t from = read_ + scratch_ * C::kWeightBytes;
    Group rows[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) Read(from + row * kRowBytes, rows[row]);
    uint32_t lines[kGroup][4];  // of each column, 16 bytes of k
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        lines[0][k] = rows[k].x, lines[1][k] = rows[k].y, lines[2][k] = rows[k].z, lines[3][k] = rows[k].w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Group* const four = rows + 4 * k;
        uint32_t words[4];
        block::TransposeBytes(four[0], four[1], four[2], four[3], words);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) lines[i][k] = words[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t offset = (written_ ^ i * 16) + i * kLineBytes;
      uint32_t small[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (C::kProducts == 3) {
          small[k] = SplitToTf32(lines[i][k]);
        } else if constexpr (std::is_same_v<T, float>) {
          lines[i][k] = RoundToTf32(__uint_as_float(lines[i][k]));
        }
      }
      StoreShared16(shared_.Weights(at_.slot, 0) + offset,
                    make_uint4(lines[i][0], lines[i][1], lines[i][2], lines[i][3]));
      if constexpr (C::kProducts == 3) {
        StoreShared16(shared_.Weights(at_.slot, 1) + offset, make_uint4(small[0], small[1], small[2], small[3]));
      }
    }
  }

  const Arguments& a_;
  const Shared<C> shared_;
  int32_t* const x_places_;
  int32_t* const value_places_;
  const int thread_, column_;
  const uint32_t copied_, read_,
      written_;  // where its first piece of a row comes and its first group is, then and later
  Kept kept_;
  Walk<C> copies_, loads_, rows_;
  RingPosition at_;
  int scratch_ = 0;  // that is transposed next
  const char* x_;    // of the tile, and its bytes in a line or (int8) piece
  uint32_t x_bytes_;
  const char* values_;  // of the tile, from this thread's piece of a row on
};

template <class C>
class Consumer {
 public:
  using T = typename C::T;
  using Acc = typename C::Acc;
  using Sums = Acc[C::kTiles][C::kColumns / 2];

  __device__ Consumer(const Arguments& a, const Shared<C>& shared, int consumer)
      : a_(a), shared_(shared), lane_(threadIdx.x % kWarpSize) {
    const int warp = threadIdx.x / kWarpSize % 4;
    token_ = consumer * (C::kTokens / C::kConsumers) + warp * 32 + lane_ / 4 * 4;
    input_offset_ = lane_ % 4 * C::kPackedBytes + token_ * static_cast<int>(sizeof(T));
  }

  __device__ void Run(const Position<C>& at) {
    Sums sum;
#pragma unroll
    for (auto& tile : sum) {
#pragma unroll
      for (Acc& v : tile) v = 0;
    }
    Reduce(sum);
    Store(at, sum);
  }

 private:
  static constexpr int kParts = C::kParts;
  static constexpr int kProductsOfStep = kLineBytes / kProductBytes;

  // Of one product: what a lane reads of x, its rows t and t + 4 of registers of k, for four tokens.
  struct Raw {
    uint32_t words[2][4];
  };
  // Operands of one product, [big, small][tile].
  struct Operands {
    uint32_t a[kParts][C::kTiles][4];
  };

  __device__ Raw Read(int product) const {
    Raw raw;
    const uint32_t from = shared_.Inputs(at_.slot) + input_offset_ + product * 8 * C::kPackedBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t line = from + half * 4 * C::kPackedBytes;
      if constexpr (std::is_same_v<T, float>) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw.words[half][0]), "=r"(raw.words[half][1]), "=r"(raw.words[half][2]),
                       "=r"(raw.words[half][3])
                     : "r"(line));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(raw.words[half][i]) : "r"(line + i * C::kRowBytes));
        }
      }
    }
    return raw;
  }

  __device__ static void Prepare(const Raw& raw, Operands& operands) {
    static_assert(C::kTiles == 2, "four tokens are two rows of two products");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = raw.words[half][i];
      } else {
        const auto& rows = raw.words[half];
        block::TransposeBytes(rows[0], rows[1], rows[2], rows[3], words);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (C::kProducts == 3) {
          operands.a[kParts - 1][i / 2][2 * half + i % 2] = SplitToTf32(words[i]);
        } else if constexpr (std::is_same_v<T, float>) {
          words[i] = RoundToTf32(__uint_as_float(words[i]));
        }
        operands.a[0][i / 2][2 * half + i % 2] = words[i];
      }
    }
  }

  __device__ void Multiply(Sums& sum, const Operands& operands, int product) const {
    const uint64_t advance = product * kProductBytes / 16;
    const uint64_t big = MmaDescriptor(shared_.Weights(at_.slot, 0), kLineBytes) + advance;
    MmaFence();
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) {
      if constexpr (C::kProducts == 3) {
        const uint64_t small = MmaDescriptor(shared_.Weights(at_.slot, 1), kLineBytes) + advance;
        MmaKMajor<C::kColumns>(sum[tile], operands.a[1][tile], big);
        MmaKMajor<C::kColumns>(sum[tile], operands.a[0][tile], small);
      }
      MmaKMajor<C::kColumns>(sum[tile], operands.a[0][tile], big);
    }
    MmaCommit();
  }

  __device__ void Release(int slot) const { BarrierArrive(shared_.Empty(slot)); }

  // Sets of operands take turns: one is prepared while the products of the other run. (Three products leave registers
  // for one set.)
  static constexpr int kSets = C::kProducts == 3 ? 1 : 2;

  __device__ void Reduce(Sums& sum) {
    Operands operands[kSets];
    int pending = 0;  // slot whose products may still run
    for (int step = 0; step < a_.steps; ++step, at_.Advance(C::kSlots)) {
      BarrierWait(shared_.Full(at_.slot), at_.parity);
      ProxyFence();  // the tensor cores read what threads wrote; here, where no reads of global memory hold it up
#pragma unroll
      for (int product = 0; product < kProductsOfStep; ++product) {
        const Raw raw = Read(product);
        MmaWait<kSets - 1>();  // the set is free
        if (product == kSets - 1) {
          if (step > 0) Release(pending);
          pending = at_.slot;
        }
        Prepare(raw, operands[product % kSets]);
        Multiply(sum, operands[product % kSets], product);
      }
    }
    MmaWait<0>();
    if (a_.steps > 0) Release(pending);
  }

  __device__ void Store(const Position<C>& at, const Sums& sum) const {
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
  __device__ void StoreAs(const Position<C>& at, const Sums& sum) const {
    struct alignas(4 * sizeof(Out)) Results {
      Out v[4];
    };
    const Geometry& g = a_.geometry;
    const int32_t token = at.token + token_;
    if (token >= g.tokens) return;
    const bool plain = IsIdentity(a_.epilogue);
#pragma unroll
    for (int i = 0; i < C::kColumns / 4; ++i) {
      const int32_t column = at.column + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
      if (column >= g.out_features) continue;
      const int64_t feature = at.batch * g.out_features + column;
      const ColumnEpilogue finish(a_.epilogue, feature);
      Results results;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Acc v = sum[k / 2][i / 2 * 4 + k % 2 * 2 + i % 2];
        if constexpr (C::kProducts == 3) {
          // Infinity minus infinity, or infinity times a half that is zero: neither is of the product asked for.
          if (isnan(v)) v = kept_rows::SumPlainly(a_, at.batch, column, token + k);
        }
        results.v[k] = plain ? To<Out>(v) : To<Out>(finish(static_cast<float>(v)));
      }
      *reinterpret_cast<Results*>(static_cast<Out*>(a_.y.data) + feature * g.tokens + token) = results;
    }
  }

  const Arguments& a_;
  const Shared<C> shared_;
  const int lane_;
  int token_, input_offset_;
  RingPosition at_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) ManyTokensRs(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const Shared<C> shared{SharedAddress(storage)};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < C::kSlots; ++slot) {
      BarrierInit(shared.Full(slot), 2 * C::kProducerThreads);
      BarrierInit(shared.Empty(slot), C::kConsumers * kWarpgroupSize);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroupSize;
  if (warpgroup >= C::kConsumers) {
    ReleaseRegisters<C::kProducerRegisters>();
    Producer<C>(a, shared, shared.Lists(storage)).Run();
  } else {
    ClaimRegisters<C::kConsumerRegisters>();
    Consumer<C> consumer(a, shared, warpgroup);
    for (int32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) consumer.Run(Position<C>::At(a, tile));
  }
}

}  // namespace nmsparse::cuda::block_wgmma_rs

#endif  // JAX_NMSPARSE_CUDA_BLOCK_WGMMA_RS_CUH_
