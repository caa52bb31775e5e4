// A byte of the mask word of an element-wise column, expanded: its kept values lie contiguous in shared memory, what
// comes out are its eight rows as four pairs of 16-bit values, zeros where the mask has no bit. No branches.
//
// The kept values of a byte begin at the rank of its first row (the number of bits before it). A table of four entries
// (the two bits of a pair) fits a register, and one byte permute looks four pairs up: the selector of each pair, and
// how many values it holds. Each half byte (four rows) reads three aligned words, shifts them to its rank, shifts once
// more for its second pair; one permute per pair then places the values and the zeros.
//
// Reads reach up to 11 bytes beyond the last kept value.
#ifndef JAX_NMSPARSE_CUDA_EW_EXPAND_BYTE_CUH_
#define JAX_NMSPARSE_CUDA_EW_EXPAND_BYTE_CUH_

#include "cuda/ew_kept.cuh"

namespace nmsparse::cuda::ew {

// What a pair's two mask bits look up, a byte for each of their four values.
struct PairTables {
  // The bytes of the selector for a permute of (a word of values, zero): values to the rows kept, in order, zeros
  // elsewhere.
  uint32_t low, high;
  uint32_t bytes;  // that the pair's kept values take

  // `zero`: one that the compiler cannot see and may differ between lanes. Constants would lie in uniform registers,
  // from where each permute first moves them, or be made anew for each use: loads that may not be repeated hide what
  // they are.
  explicit __device__ __forceinline__ PairTables(uint32_t zero) {
    static volatile uint32_t tables[3] = {0x10441044u, 0x32104444u, 0x04020200u};
    low = tables[zero], high = tables[zero + 1], bytes = tables[zero + 2];
  }
};

// This lane's bytes of two mask words (in the low and the high half), two bits to a half byte, the first's in the low
// half of the result.
__device__ __forceinline__ uint32_t PairsOfBytes(uint32_t bytes) {
  const uint32_t pairs = (bytes & 0x000f000fu) | (bytes >> 4 & 0x0f000f00u);
  return (pairs | pairs << 2) & 0x33333333u;
}

// Eight rows of one column: what their pairs are made of, read and looked up.
class ByteOfColumn {
 public:
  // The kept values begin at the shared-memory address `from` + `offset`. `pairs`: two bits of the mask in each half
  // byte.
  __device__ __forceinline__ ByteOfColumn(const PairTables& tables, uint32_t from, int offset, uint32_t pairs) {
    low_ = Permute(tables.low, 0, pairs), high_ = Permute(tables.high, 0, pairs);
    const uint32_t bytes = Permute(tables.bytes, 0, pairs);
    // Dot products of bytes run beside the integer pipe, which limits these kernels.
    Read(from, offset, words_[0]);
    shifts_[0] = from * 8;
    first_bits_[0] = __dp4a(bytes, 0x00000008u, 0u);
    from = __dp4a(bytes, 0x00000101u, from);
    Read(from, offset, words_[1]);
    shifts_[1] = from * 8;
    first_bits_[1] = __dp4a(bytes, 0x00080000u, 0u);
  }

  __device__ __forceinline__ void Expand(uint32_t (&pairs)[4]) const {
    Expand(0, Permute(low_, high_, 0x40), Permute(low_, high_, 0x51), &pairs[0], &pairs[1]);
    Expand(1, Permute(low_, high_, 0x62), Permute(low_, high_, 0x73), &pairs[2], &pairs[3]);
  }

 private:
  __device__ __forceinline__ static void Read(uint32_t from, int offset, uint32_t (&words)[3]) {
    uint32_t word;  // by hand, so that the offset stays an immediate of the loads
    asm("and.b32 %0, %1, 0xfffffffc;" : "=r"(word) : "r"(from));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(word + offset) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[1]) : "r"(word + offset + 4) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[2]) : "r"(word + offset + 8) : "memory");
  }

  // The low halves of the selectors select.
  __device__ __forceinline__ void Expand(int half, uint32_t selector0, uint32_t selector1, uint32_t* pair0,
                                         uint32_t* pair1) const {
    const auto& words = words_[half];
    const uint32_t low = __funnelshift_r(words[0], words[1], shifts_[half]);  // counts modulo 32
    const uint32_t high = __funnelshift_r(words[1], words[2], shifts_[half]);
    *pair0 = Permute(low, 0, selector0);
    *pair1 = Permute(__funnelshift_rc(low, high, first_bits_[half]), 0, selector1);
  }

  uint32_t low_, high_;  // bytes of the four selectors
  // Of each half byte: three words that hold its values, where these begin in them, and how many bits are the first
  // pair's.
  uint32_t words_[2][3], shifts_[2], first_bits_[2];
};

}  // namespace nmsparse::cuda::ew

#endif  // JAX_NMSPARSE_CUDA_EW_EXPAND_BYTE_CUH_
