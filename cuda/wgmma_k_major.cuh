// Warpgroup matrix products of Hopper (sm_90a) of TF32 and int8 operands: d [64, n] += a [64, k] b [k, n] with a in
// registers, b in shared memory. These types exist with k contiguous only: a line of b is 128 bytes of k of one column,
// lines of consecutive columns follow each other, swizzled as wgmma.cuh states. A product takes 32 bytes of k.
//
// Registers of a, lane 4 g + t of warp w: register r is row 16 w + g + 8 (r % 2), and of k the 4 bytes from
// 4 t + 16 (r / 2) on. Accumulators are those of wgmma.cuh.
#ifndef JAX_NMSPARSE_CUDA_WGMMA_K_MAJOR_CUH_
#define JAX_NMSPARSE_CUDA_WGMMA_K_MAJOR_CUH_

#include "cuda/wgmma.cuh"

namespace nmsparse::cuda {

inline constexpr int kProductBytes = 32;  // of k

// Operand lists: NMS_Rn names operands %0 ... %n-1 in the template, NMS_D8(c, i) binds d[i] ... d[i + 7].
#define NMS_D8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define NMS_D32(c, i) NMS_D8(c, i), NMS_D8(c, i + 8), NMS_D8(c, i + 16), NMS_D8(c, i + 24)
#define NMS_R10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define NMS_R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NMS_R10(1) "," NMS_R10(2) ",%30,%31"
#define NMS_R64                                                                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NMS_R10(1) "," NMS_R10(2) "," NMS_R10(3) "," NMS_R10(4) "," NMS_R10( \
      5) ",%60,%61,%62,%63"
#define NMS_K_MAJOR(shape, registers, a0, a1, a2, a3, b, scales, ...)                                         \
  asm volatile("wgmma.mma_async.sync.aligned." shape " {" registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
               "}, %" #b ", 1" scales ";\n"                                                                   \
               : __VA_ARGS__                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor))

// Asynchronous: fence before, commit and wait after; a may be written again when the product is waited for.
template <int kN>
__device__ __forceinline__ void MmaKMajor(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor) {
  static_assert(kN == 64 || kN == 128, "only the widths in use are spelled out");
#define NMS_FLOAT(v) "+f"(v)
  if constexpr (kN == 64)
    NMS_K_MAJOR("m64n64k8.f32.tf32.tf32", NMS_R32, 32, 33, 34, 35, 36, ", 1, 1", NMS_D32(NMS_FLOAT, 0));
  if constexpr (kN == 128)
    NMS_K_MAJOR("m64n128k8.f32.tf32.tf32", NMS_R64, 64, 65, 66, 67, 68, ", 1, 1", NMS_D32(NMS_FLOAT, 0),
                NMS_D32(NMS_FLOAT, 32));
#undef NMS_FLOAT
}

template <int kN>
__device__ __forceinline__ void MmaKMajor(int32_t (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor) {
  static_assert(kN == 64 || kN == 128, "only the widths in use are spelled out");
#define NMS_INT(v) "+r"(v)
  if constexpr (kN == 64) NMS_K_MAJOR("m64n64k32.s32.s8.s8", NMS_R32, 32, 33, 34, 35, 36, "", NMS_D32(NMS_INT, 0));
  if constexpr (kN == 128)
    NMS_K_MAJOR("m64n128k32.s32.s8.s8", NMS_R64, 64, 65, 66, 67, 68, "", NMS_D32(NMS_INT, 0), NMS_D32(NMS_INT, 32));
#undef NMS_INT
}

#undef NMS_K_MAJOR
#undef NMS_R64
#undef NMS_R32
#undef NMS_R10
#undef NMS_D32
#undef NMS_D8

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_WGMMA_K_MAJOR_CUH_
