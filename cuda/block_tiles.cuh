// Building bricks of the few-token kernels: asynchronous copies, ldmatrix, mma.sync, clusters, and the transposed tile
// of x with its table of kept rows.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_TILES_CUH_
#define JAX_NMSPARSE_CUDA_BLOCK_TILES_CUH_

#include "cuda/device.cuh"

namespace nmsparse::cuda::block {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Elements of values and words of mask per batch entry, and rows of W per window, on either side.
__host__ __device__ inline int64_t ValuesPerBatch(const Geometry& g) {
  return g.windows * g.out_blocks * g.q * g.bk * g.bn;
}
__host__ __device__ inline int64_t MaskPerBatch(const Geometry& g) { return g.windows * g.out_blocks * g.mask_words; }

// ------------------------------------------------------------------------------------------- asynchronous copies

// kBytes (4, 8 or 16) from global to shared memory; zeros, and no read, where `valid` is false.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes));
  }
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// kWords (1, 2 or 4) aligned 32-bit words of shared memory.
template <int kWords>
__device__ __forceinline__ void LoadWords(uint32_t (&out)[kWords], const void* shared) {
  if constexpr (kWords == 4) {
    const uint4 v = *static_cast<const uint4*>(shared);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = *static_cast<const uint2*>(shared);
    out[0] = v.x, out[1] = v.y;
  } else {
    out[0] = *static_cast<const uint32_t*>(shared);
  }
}

// ------------------------------------------------------------------------------------------------- tensor cores

// Two or four 8x8 tiles of 16-bit elements whose rows lie anywhere in shared memory, 16 bytes each, transposed:
// register i of lane 4 * g + t holds elements (2t, g) and (2t + 1, g) of tile i. Lane 8 * i + r gives the address of
// row r.
__device__ __forceinline__ void LoadTransposed(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address));
}
__device__ __forceinline__ void LoadTransposed(uint32_t (&out)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(address));
}

// d [16, 8] += a [16, 16] b [16, 8]; lane 4 * g + t holds of a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t
// + 8..), of b: (2t.., g), (2t + 8.., g), of d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
template <class Value>
__device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<Value, __half>, "the tensor-core kernels multiply bfloat16 or float16");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Element `odd` (0 or 1) of two words of 16-bit elements, side by side.
__device__ __forceinline__ uint32_t PairUp(uint32_t low, uint32_t high, int odd) {
  return __byte_perm(low, high, odd ? 0x7632 : 0x5410);
}

// columns[i]: byte i of the four rows.
__device__ __forceinline__ void TransposeBytes(uint32_t row0, uint32_t row1, uint32_t row2, uint32_t row3,
                                               uint32_t (&columns)[4]) {
  // Bytes 0 1 or 2 3 of two rows, interleaved; then of four.
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t select = pair ? 0x7362 : 0x5140;
    const uint32_t low = __byte_perm(row0, row1, select), high = __byte_perm(row2, row3, select);
    columns[pair * 2] = PairUp(low, high, 0);
    columns[pair * 2 + 1] = PairUp(low, high, 1);
  }
}

// ----------------------------------------------------------------------------------------------------- clusters

// Before sm_90 a cluster is one block: the launchers split nothing there.
__device__ __forceinline__ void SyncCluster(int splits) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

__device__ __forceinline__ float4 LoadFromBlock(uint32_t address, int block) {
#if __CUDA_ARCH__ >= 900
  float4 v;
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(remote)
               : "memory");
  return v;
#else
  return LoadShared16<float4>(address);
#endif
}

// ---------------------------------------------------------------------------------------------------- x transposed

// kRows rows of xᵀ, each 8 * kTokenTiles tokens, in 16-byte units of 8 tokens, and behind them one row of zeros.
//
// Unit c of row k lies at byte Row(k) ^ 16 * c. Row(k) spreads over the 8 bank groups both 8 rows of one octet
// (ldmatrix reads kept rows, mostly neighbours) and row i of 8 consecutive octets (Store writes those together).
//
// Thread i stages 8 rows (octet i % kOctets) of kTaskTokens tokens: Load reads 16 bytes of each token of x into
// registers, Store transposes them, so that the latency of Load is hidden behind the tile before.
template <int kTokenTiles, int kThreads, int kUnits_>
struct XTile {
  static constexpr int kUnits = kUnits_;  // of 8 tokens of one row
  static constexpr int kRows = kUnits / kTokenTiles;
  static constexpr int kOctets = kRows / 8;
  static constexpr int kTaskTokens = kRows * kTokenTiles / kThreads;  // 8 rows each
  static constexpr int kZeroRow = kUnits * 16;
  static constexpr int kBytes = (kUnits + 8) * 16;
  static_assert(kTokenTiles == 1 || kTokenTiles == 2 || kTokenTiles == 4 || kTokenTiles == 8,
                "the swizzle is written for 8, 16, 32 and 64 tokens");
  static_assert(kTaskTokens == 4 || kTaskTokens == 8, "a task stores 8 or 16 bytes of a row");
  static_assert(kBytes % 128 == 0 && kZeroRow + 128 <= 65536, "row addresses are 16-bit and xor with a unit");

  __device__ static __forceinline__ uint32_t Row(uint32_t k) {
    constexpr uint32_t kShift = kTokenTiles == 8 ? 0 : kTokenTiles == 4 ? 1 : 2;
    return ((k * kTokenTiles) ^ (k >> 3 & 7) ^ (k >> kShift & (kTokenTiles - 1))) * 16;
  }
  // Row(k + i) == Row(k) ^ Row(i) for k a multiple of 8 and i < 8: no carry, and the swizzle is linear over xor.

  uint4 rows[kTaskTokens];  // token, 8 consecutive k

  // `x`: token 0, row 0 of this tile; `tokens`: how many there are; `features`: how many rows until in_features;
  // `live`: rows of the tile that are used. Everything else is zero.
  template <class T>
  __device__ __forceinline__ void Load(const T* x, int64_t pitch, int tokens, int64_t features, int live,
                                       bool aligned) {
    const int k = threadIdx.x % kOctets * 8, token = threadIdx.x / kOctets * kTaskTokens;
    if (k >= live) return;
    const T* source = x + token * pitch + k;
    if (aligned && k + 8 <= features && token + kTaskTokens <= tokens) {
#pragma unroll
      for (int i = 0; i < kTaskTokens; ++i, source += pitch) rows[i] = __ldg(reinterpret_cast<const uint4*>(source));
      return;
    }
#pragma unroll
    for (int i = 0; i < kTaskTokens; ++i) {
      rows[i] = make_uint4(0, 0, 0, 0);
      if (token + i < tokens) {
        if (aligned && k + 8 <= features) {
          rows[i] = __ldg(reinterpret_cast<const uint4*>(source + i * pitch));
        } else {
          const uint16_t* s = reinterpret_cast<const uint16_t*>(source + i * pitch);
          uint32_t w[4] = {};
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            if (k + j < features) w[j / 2] |= static_cast<uint32_t>(s[j]) << (j % 2 * 16);
          }
          rows[i] = make_uint4(w[0], w[1], w[2], w[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void Store(unsigned char* tile, int live) const {
    const int k = threadIdx.x % kOctets * 8, token = threadIdx.x / kOctets * kTaskTokens;
    if (k >= live) return;
    const uint32_t first = Row(k) ^ (token / 8 * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t w[kTaskTokens / 2];
#pragma unroll
      for (int p = 0; p < kTaskTokens / 2; ++p) {
        const uint4 &a = rows[2 * p], &b = rows[2 * p + 1];
        const uint32_t low = i < 2 ? a.x : i < 4 ? a.y : i < 6 ? a.z : a.w;
        const uint32_t high = i < 2 ? b.x : i < 4 ? b.y : i < 6 ? b.z : b.w;
        w[p] = PairUp(low, high, i % 2);
      }
      unsigned char* const at = tile + (first ^ Row(i)) + token % 8 * 2;
      if constexpr (kTaskTokens == 8) {
        *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
      } else {
        *reinterpret_cast<uint2*>(at) = make_uint2(w[0], w[1]);
      }
    }
  }
};

// Writes XTile::Row of the kept rows of one (window, block) to `table`, in the order of the values. `first_row`: the
// window's first row inside the tile. Missing bits of a corrupt mask point at the row of zeros, surplus bits are
// ignored.

// One byte of a mask of 32 units of one row: one thread. `first_row` is a multiple of 8.
template <class Tile>
__device__ __forceinline__ void TabulateByte(uint16_t* table, int q, uint32_t word, int byte, int first_row) {
  int rank = __popc(word & ((1u << byte * 8) - 1));
  const uint32_t bits = word >> byte * 8, row = Tile::Row(first_row + byte * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((bits >> i & 1) != 0 && rank < q) table[rank++] = static_cast<uint16_t>(row ^ Tile::Row(i));
  }
  if (byte == 3) {
#pragma unroll 1
    for (; rank < q; ++rank) table[rank] = Tile::kZeroRow;
  }
}

// Any window: one thread.
template <class Tile>
__device__ __forceinline__ void TabulateWindow(uint16_t* table, int q, int bk, int window_units, const uint32_t* words,
                                               int first_row) {
  int rank = 0;
#pragma unroll 1
  for (int unit = 0; unit < window_units && rank < q; ++unit) {
    if ((__ldg(words + unit / kMaskBits) >> unit % kMaskBits & 1) == 0) continue;
#pragma unroll 1
    for (int r = 0; r < bk; ++r) table[rank * bk + r] = static_cast<uint16_t>(Tile::Row(first_row + unit * bk + r));
    ++rank;
  }
#pragma unroll 1
  for (int j = rank * bk; j < q * bk; ++j) table[j] = Tile::kZeroRow;
}

// ------------------------------------------------------------------------------------------------------- stores

// Four neighbouring results of one token, through the epilogue; columns at or beyond `columns` are not written.
template <class T>
__device__ __forceinline__ void StoreFour(const Problem& problem, int64_t index, int64_t feature, int columns,
                                          float4 v) {
  float part[4] = {v.x, v.y, v.z, v.w};
  if (!IsIdentity(problem.epilogue)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < columns) part[i] = ApplyEpilogue(problem.epilogue, feature + i, part[i]);
    }
  }
  struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) Four {
    T v[4];
  };
  T* out = static_cast<T*>(problem.result.data) + index;
  if (columns >= 4 && reinterpret_cast<uintptr_t>(out) % alignof(Four) == 0) {
    *reinterpret_cast<Four*>(out) = Four{{To<T>(part[0]), To<T>(part[1]), To<T>(part[2]), To<T>(part[3])}};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < columns) out[i] = To<T>(part[i]);
    }
  }
}

// The end of a kernel whose depth is split over `groups` of warps and a cluster of `splits` blocks: adds the partial
// sums, each in ascending order, and stores y for `tokens` tokens and `columns` columns from `first_column` on.
// `partial` [groups][tokens][columns + 4] in shared memory, the same place in every block of the cluster; `columns` is
// a power of two. All threads of all its blocks; nothing may touch `partial` afterwards before the kernel ends.
template <int kThreads>
__device__ __forceinline__ void CombineAndStore(const Problem& problem, float* partial, int64_t first_token, int tokens,
                                                int64_t first_column, int columns, int groups, int split, int splits) {
  const Geometry& geometry = problem.geometry;
  const int64_t batch = blockIdx.z;
  const int pitch = columns + 4, quads = columns / 4, shift = __ffs(quads) - 1, work = tokens << shift;
  __syncthreads();
  if (groups > 1) {
    for (int e = threadIdx.x; e < work; e += kThreads) {
      float* const at = partial + (e >> shift) * pitch + (e & (quads - 1)) * 4;
      float4 total = *reinterpret_cast<float4*>(at);
      for (int g = 1; g < groups; ++g) {
        const float4 v = *reinterpret_cast<float4*>(at + g * tokens * pitch);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      *reinterpret_cast<float4*>(at) = total;
    }
  }
  SyncCluster(splits);
  WithOutputType(problem.result.dtype, [&](auto zero) {
    const int64_t first = (batch * geometry.tokens + first_token) * geometry.out_features + first_column;
    for (int e = split * kThreads + threadIdx.x; e < work; e += splits * kThreads) {
      const int token = e >> shift, column = (e & (quads - 1)) * 4;
      const uint32_t at = SharedAddress(partial + token * pitch + column);
      float4 total = make_float4(0, 0, 0, 0);
      for (int s = 0; s < splits; ++s) {
        const float4 v = LoadFromBlock(at, s);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      const int64_t left = geometry.out_features - first_column - column;
      if (left > 0) {
        StoreFour<decltype(zero)>(problem, first + token * geometry.out_features + column,
                                  batch * geometry.out_features + first_column + column,
                                  static_cast<int>(min(left, int64_t{4})), total);
      }
    }
  });
  SyncCluster(splits);  // no block may leave while another still reads its sums
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_TILES_CUH_
