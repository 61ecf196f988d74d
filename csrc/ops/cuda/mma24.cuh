// 16-bit floats on the tensor cores, for sparse24_skinny.cuh. Fragments as in the PTX manual, "Matrix
// fragments for mma.m16n8k16" and "… for sparse mma.m16n8k32".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace drot {

// PTX 8.5 (CUDA 12.5) has a form that asks for ascending positions, which ours are; newer GPUs are slow
// without it.
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5)
#define DROT_MMA_SPARSE "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32."
#else
#define DROT_MMA_SPARSE "mma.sp.sync.aligned.m16n8k32.row.col.f32."
#endif

#define DROT_MULTIPLY_SPARSE(type)                                                                       \
  asm volatile(DROT_MMA_SPARSE type "." type                                                             \
                                    ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "      \
                                    "{%0, %1, %2, %3}, %12, %13;"                                        \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), \
                 "r"(metadata), "n"(kSelector))

#define DROT_MULTIPLY_DENSE(type)                                                     \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

struct Bf16Element {
  __device__ static float wide(uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
  __device__ static uint16_t narrow(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  template <int kSelector>
  __device__ static void multiply_sparse(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                         uint32_t metadata) {
    DROT_MULTIPLY_SPARSE("bf16");
  }
  __device__ static void multiply_dense(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    DROT_MULTIPLY_DENSE("bf16");
  }
};

struct Fp16Element {
  __device__ static float wide(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  __device__ static uint16_t narrow(float x) { return __half_as_ushort(__float2half_rn(x)); }
  template <int kSelector>
  __device__ static void multiply_sparse(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                         uint32_t metadata) {
    DROT_MULTIPLY_SPARSE("f16");
  }
  __device__ static void multiply_dense(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    DROT_MULTIPLY_DENSE("f16");
  }
};

#undef DROT_MULTIPLY_SPARSE
#undef DROT_MULTIPLY_DENSE

}  // namespace drot
