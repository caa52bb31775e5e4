// Warpgroup matrix products of Hopper (sm_90a) whose A operand is not an ordinary tile in shared memory: sparse (2 of
// every 4 along k), or dense in registers. B is MN-major in shared memory, accumulators are those of wgmma.cuh.
//
// Sparse A, [64 rows][16 kept of 32 k], K-major with 32-byte swizzle: rows of 32 bytes follow each other; the two
// 16-byte halves of rows 4 to 7 of every eight change places. Metadata: two bits per kept value, its position in its
// group of four. Lane l of warp w supplies those of rows 16 w + l / 4 (low half) and 8 more (high half): of groups 0..3
// where l is even, 4..7 where it is odd. The selector names the lanes that count: l % 4 of 0 and 1, or of 2 and 3.
//
// Dense A in registers, [64 rows][16 k]: register r of lane l of warp w holds row 16 w + l / 4 + 8 (r % 2), and k
// 2 (l % 4) + 8 (r / 2) in its low half, the next in its high half.
#ifndef JAX_NMSPARSE_CUDA_WGMMA_WEIGHTS_CUH_
#define JAX_NMSPARSE_CUDA_WGMMA_WEIGHTS_CUH_

#include "cuda/wgmma.cuh"

namespace nmsparse::cuda {

inline constexpr int kSparseDepth = 32;     // k of a sparse product
inline constexpr int kSparseRowBytes = 32;  // its kept values of one row

// Descriptor of a sparse operand whose first row is at the shared-memory address `address`, a multiple of 256.
__device__ __forceinline__ uint64_t SparseDescriptor(uint32_t address) {
  constexpr uint64_t kSwizzle32 = uint64_t{3} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kSparseRowBytes / 16} << 32;
  return kSwizzle32 | kEightRows | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

// Operand lists, as in wgmma.cuh.
#define NMS_D8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define NMS_D32(i) NMS_D8(i), NMS_D8(i + 8), NMS_D8(i + 16), NMS_D8(i + 24)
#define NMS_R10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define NMS_R60 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NMS_R10(1) "," NMS_R10(2) "," NMS_R10(3) "," NMS_R10(4) "," NMS_R10(5)
#define NMS_R64 NMS_R60 ",%60,%61,%62,%63"
#define NMS_R128                                                                                   \
  NMS_R60 "," NMS_R10(6) "," NMS_R10(7) "," NMS_R10(8) "," NMS_R10(9) "," NMS_R10(10) "," NMS_R10( \
      11) ",%120,%121,%122,%123,%124,%125,%126,%127"
#define NMS_SPARSE(n, type, registers, a, b, e, selector, flag, ...)                                                \
  asm volatile("{ .reg .pred accumulate; setp.ne.b32 accumulate, %" #flag                                           \
               ", 0;\n"                                                                                             \
               "wgmma.mma_async.sp.sync.aligned.m64n" #n "k32.f32." type "." type " {" registers "}, %" #a ", %" #b \
               ", %" #e ", %" #selector ", accumulate, 1, 1, 0, 1; }\n"                                             \
               : __VA_ARGS__                                                                                        \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(metadata), "n"(kSelector), "r"(accumulate))
#define NMS_REGISTERS(n, type, registers, a0, a1, a2, a3, b, flag, ...)                                             \
  asm volatile("{ .reg .pred accumulate; setp.ne.b32 accumulate, %" #flag                                           \
               ", 0;\n"                                                                                             \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, {%" #a0 ", %" #a1 \
               ", %" #a2 ", %" #a3 "}, %" #b ", accumulate, 1, 1, 1; }\n"                                           \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate))

// Keeps a value in its register up to here.
__device__ __forceinline__ void KeepRegister(uint32_t& value) { asm volatile("" : "+r"(value)); }

// d = a b (+ d where `accumulate` is not 0) over 32 k. Asynchronous: fence before, commit and wait after. The register
// of `metadata` is read until then: KeepRegister it after the wait.
template <class T, int kN, int kSelector>
__device__ __forceinline__ void MmaSparse(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor,
                                          uint32_t metadata, int accumulate) {
  static_assert(kN == 128 || kN == 256, "only the token tiles in use are spelled out");
  constexpr bool kBF16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBF16 || std::is_same_v<T, __half>, "MN-major operands exist for 16-bit types only");
  if constexpr (kN == 128 && kBF16) NMS_SPARSE(128, "bf16", NMS_R64, 64, 65, 66, 67, 68, NMS_D32(0), NMS_D32(32));
  if constexpr (kN == 128 && !kBF16) NMS_SPARSE(128, "f16", NMS_R64, 64, 65, 66, 67, 68, NMS_D32(0), NMS_D32(32));
  if constexpr (kN == 256 && kBF16)
    NMS_SPARSE(256, "bf16", NMS_R128, 128, 129, 130, 131, 132, NMS_D32(0), NMS_D32(32), NMS_D32(64), NMS_D32(96));
  if constexpr (kN == 256 && !kBF16)
    NMS_SPARSE(256, "f16", NMS_R128, 128, 129, 130, 131, 132, NMS_D32(0), NMS_D32(32), NMS_D32(64), NMS_D32(96));
}

// The same over 16 k, with a in registers. They may be written again when the product is waited for.
template <class T, int kN>
__device__ __forceinline__ void MmaRegisters(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor,
                                             int accumulate) {
  static_assert(kN == 128 || kN == 256, "only the token tiles in use are spelled out");
  constexpr bool kBF16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBF16 || std::is_same_v<T, __half>, "MN-major operands exist for 16-bit types only");
  if constexpr (kN == 128 && kBF16)
    NMS_REGISTERS(128, "bf16", NMS_R64, 64, 65, 66, 67, 68, 69, NMS_D32(0), NMS_D32(32));
  if constexpr (kN == 128 && !kBF16)
    NMS_REGISTERS(128, "f16", NMS_R64, 64, 65, 66, 67, 68, 69, NMS_D32(0), NMS_D32(32));
  if constexpr (kN == 256 && kBF16)
    NMS_REGISTERS(256, "bf16", NMS_R128, 128, 129, 130, 131, 132, 133, NMS_D32(0), NMS_D32(32), NMS_D32(64),
                  NMS_D32(96));
  if constexpr (kN == 256 && !kBF16)
    NMS_REGISTERS(256, "f16", NMS_R128, 128, 129, 130, 131, 132, 133, NMS_D32(0), NMS_D32(32), NMS_D32(64),
                  NMS_D32(96));
}

#undef NMS_REGISTERS
#undef NMS_SPARSE
#undef NMS_R128
#undef NMS_R64
#undef NMS_R60
#undef NMS_R10
#undef NMS_D32
#undef NMS_D8

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_WGMMA_WEIGHTS_CUH_
