// Warpgroup matrix products of Hopper (sm_90a): d[64, N] += a[64, 16] b[16, N], both operands in shared memory, with
// 128-byte swizzle (PTX ISA "Strides"): a line is 128 bytes, 64 elements; the 16-byte piece p of the line at address a
// lies at piece p ^ (a / 128 % 8). Operands start at multiples of 1024 bytes, so that a line's number modulo 8 is its
// swizzle phase.
//
// MN-major: a line holds 64 consecutive elements of the 64 (or N) axis for one k; lines of consecutive k follow each
//   other. Further runs of 64 elements ("chunks") start `chunk_bytes` later. 16 k are 16 lines.
// K-major: a line holds 64 consecutive k of one row (or column); lines of consecutive rows follow each other. 16 k are
//   32 bytes of every line; `chunk_bytes` means nothing.
//
// Accumulator of a thread (warp w of the warpgroup, lane l): d[4 j + i] is row 16 w + l / 4 + 8 (i / 2), column
// 8 j + 2 (l % 4) + i % 2.
#ifndef JAX_NMSPARSE_CUDA_WGMMA_CUH_
#define JAX_NMSPARSE_CUDA_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace nmsparse::cuda {

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kMmaRows = 64;
inline constexpr int kMmaDepth = 16;
inline constexpr int kLineBytes = 128;  // one k of one chunk
inline constexpr int kChunk = 64;       // 16-bit elements of a line

// Which axis of an operand is contiguous in shared memory; the value is the instruction's "transposed" flag.
enum class Major { kK = 0, kMN = 1 };

// What the descriptor of an operand advances by for the next 16 k, in the units of the descriptor.
template <Major kMajor>
inline constexpr uint64_t kDepthAdvance = kMajor == Major::kMN ? kMmaDepth * kLineBytes / 16 : kMmaDepth * 2 / 16;

// Descriptor of an operand whose first line is at the shared-memory address `address`.
__device__ __forceinline__ uint64_t MmaDescriptor(uint32_t address, uint32_t chunk_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightLines = uint64_t{8 * kLineBytes / 16} << 32;
  return kSwizzle128 | kEightLines | uint64_t{chunk_bytes >> 4} << 16 | (address & 0x3ffff) >> 4;
}

// Orders register and shared-memory writes of the warpgroup before the products that follow.
__device__ __forceinline__ void MmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void MmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void MmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operand lists: NMS_Rn names operands %0 ... %n-1 in the template, NMS_D8(i) binds d[i] ... d[i + 7].
#define NMS_D8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define NMS_D32(i) NMS_D8(i), NMS_D8(i + 8), NMS_D8(i + 16), NMS_D8(i + 24)
#define NMS_R10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define NMS_R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NMS_R10(1) "," NMS_R10(2) ",%30,%31"
#define NMS_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NMS_R64                                                                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NMS_R10(1) "," NMS_R10(2) "," NMS_R10(3) "," NMS_R10(4) "," NMS_R10( \
      5) ",%60,%61,%62,%63"
#define NMS_R128 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NMS_R10(1) "," NMS_R10(2) "," NMS_R10(3) "," NMS_R10(4) "," NMS_R10(5) ","  \
  NMS_R10(6) "," NMS_R10(7) "," NMS_R10(8) "," NMS_R10(9) "," NMS_R10(10) "," NMS_R10(11)                      \
  ",%120,%121,%122,%123,%124,%125,%126,%127"
// The last two flags say whether the operands are MN-major.
#define NMS_WGMMA(n, type, registers, a, b, flag, a_major, b_major, ...)                                         \
  asm volatile("{ .reg .pred accumulate; setp.ne.b32 accumulate, %" #flag                                        \
               ", 0;\n"                                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, %" #a ", %" #b \
               ", accumulate, 1, 1, %" #a_major ", %" #b_major "; }\n"                                           \
               : __VA_ARGS__                                                                                     \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate), "n"(static_cast<int>(kA)),               \
                 "n"(static_cast<int>(kB)))

// d = a b (+ d where `accumulate` is not 0). T: __nv_bfloat16 or __half. Asynchronous: fence before, commit and wait
// after.
template <class T, int kN, Major kA = Major::kMN, Major kB = Major::kMN>
__device__ __forceinline__ void Mma(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, int accumulate) {
  static_assert(kN == 32 || kN == 64 || kN == 128 || kN == 256, "only the widths in use are spelled out");
  constexpr bool kBF16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBF16 || std::is_same_v<T, __half>, "MN-major operands exist for 16-bit types only");
  if constexpr (kN == 32 && kBF16) NMS_WGMMA(32, "bf16", NMS_R16, 16, 17, 18, 19, 20, NMS_D8(0), NMS_D8(8));
  if constexpr (kN == 32 && !kBF16) NMS_WGMMA(32, "f16", NMS_R16, 16, 17, 18, 19, 20, NMS_D8(0), NMS_D8(8));
  if constexpr (kN == 64 && kBF16) NMS_WGMMA(64, "bf16", NMS_R32, 32, 33, 34, 35, 36, NMS_D32(0));
  if constexpr (kN == 64 && !kBF16) NMS_WGMMA(64, "f16", NMS_R32, 32, 33, 34, 35, 36, NMS_D32(0));
  if constexpr (kN == 128 && kBF16) NMS_WGMMA(128, "bf16", NMS_R64, 64, 65, 66, 67, 68, NMS_D32(0), NMS_D32(32));
  if constexpr (kN == 128 && !kBF16) NMS_WGMMA(128, "f16", NMS_R64, 64, 65, 66, 67, 68, NMS_D32(0), NMS_D32(32));
  if constexpr (kN == 256 && kBF16)
    NMS_WGMMA(256, "bf16", NMS_R128, 128, 129, 130, 131, 132, NMS_D32(0), NMS_D32(32), NMS_D32(64), NMS_D32(96));
  if constexpr (kN == 256 && !kBF16)
    NMS_WGMMA(256, "f16", NMS_R128, 128, 129, 130, 131, 132, NMS_D32(0), NMS_D32(32), NMS_D32(64), NMS_D32(96));
}

// The same with a in registers: per warp 16 rows x 16 k, as ldmatrix.x4 loads them from 16 rows and two halves of k.
template <class T, int kN, Major kB>
__device__ __forceinline__ void MmaRegisters(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor,
                                             int accumulate) {
  static_assert(kN == 256, "only the width in use is spelled out");
#define NMS_WGMMA_REGISTERS(type)                                                \
  asm volatile(                                                                  \
      "{ .reg .pred accumulate; setp.ne.b32 accumulate, %133, 0;\n"              \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" NMS_R128 \
      "}, {%128, %129, %130, %131}, %132"                                        \
      ", accumulate, 1, 1, %134; }\n"                                            \
      : NMS_D32(0), NMS_D32(32), NMS_D32(64), NMS_D32(96)                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate), "n"(static_cast<int>(kB)))
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    NMS_WGMMA_REGISTERS("bf16");
  } else {
    NMS_WGMMA_REGISTERS("f16");
  }
#undef NMS_WGMMA_REGISTERS
}

#undef NMS_WGMMA
#undef NMS_R128
#undef NMS_R64
#undef NMS_R32
#undef NMS_R16
#undef NMS_R10
#undef NMS_D32
#undef NMS_D8

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_WGMMA_CUH_
