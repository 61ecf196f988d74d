// Tensor-core products of 16-bit floats (mma and mma.sp) for the kernels of sparse24_skinny.cuh and
// spectral_step_block.cuh, and the tables of which lane holds which element of an operand.
//
// Both instructions compute D = A B + D by one warp. A lane has four elements of D, in fp32. Each of its
// 32-bit registers of A and B has two elements, the first in the low half: neighbours in a row of A, in a
// column of B. With g = lane / 4 and t = lane % 4 (PTX manual, "Matrix fragments for mma.m16n8k16" and "… for
// sparse mma.m16n8k32"):
//
//   mma.m16n8k16: A [16, 16], B [16, 8], D [16, 8]
//
//     register           row                column
//     a[0], a[1]         g, g + 8           2 t, 2 t + 1
//     a[2], a[3]         g, g + 8           2 t + 8, 2 t + 9
//     b0                 2 t, 2 t + 1       g
//     b1                 2 t + 8, 2 t + 9   g
//     sum[0], sum[1]     g                  2 t, 2 t + 1
//     sum[2], sum[3]     g + 8              2 t, 2 t + 1
//
//   mma.sp.m16n8k32: A [16, 32], two non-zeros in each group of four columns; B [32, 8], D [16, 8]
//
//     register       row                        column
//     a[0], a[1]     g, g + 8                   the two non-zeros of group t (columns 4 t … 4 t + 3)
//     a[2], a[3]     g, g + 8                   the two non-zeros of group t + 4
//     b[i]           8 i + 2 t, 8 i + 2 t + 1   g
//     sum            as above
//
//   The metadata of mma.sp are the positions of the non-zeros in their groups, 4 bits per group: the first
//   position in the lower two bits, the second in the upper two. With the selector s = 0 or 1:
//
//     lane               bits 0 … 15             bits 16 … 31
//     t = 2 s            row g, groups 0 … 3     row g + 8, groups 0 … 3
//     t = 2 s + 1        row g, groups 4 … 7     row g + 8, groups 4 … 7
//     the other two      ignored                 ignored
//
// sparse24_skinny multiplies 64 columns of W, 16 groups per row, by two products of mma.sp. The result does
// not depend on the order of the columns if A and B have the same order, so the order is chosen by what a
// lane loads at once: 16 bytes of values, the non-zeros of groups 4 t … 4 t + 3 of W.
//
//     operand                            groups of W in product 0         in product 1
//                                        (selector 0)                     (selector 1)
//     a[0], a[1] (group t of A)          4 t                              4 t + 2
//     a[2], a[3] (group t + 4 of A)      4 t + 1                          4 t + 3
//     b[0], b[1]                         4 (t / 2), 4 (t / 2) + 8         4 (t / 2) + 2, 4 (t / 2) + 10
//     b[2], b[3]                         4 (t / 2) + 1, 4 (t / 2) + 9     4 (t / 2) + 3, 4 (t / 2) + 11
//     metadata of lane t = 2 s           0, 4, 8, 12                      2, 6, 10, 14
//     metadata of lane t = 2 s + 1       1, 5, 9, 13                      3, 7, 11, 15
//
// t / 2 is rounded down. Each b has one half of its group: columns 0 and 1 if t is even, 2 and 3 if t is odd.
// In both products the metadata of lane t are the positions of groups t, t + 4, t + 8 and t + 12.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace drot {

// ordered_metadata (PTX 8.5, CUDA 12.5) requires ascending positions, which the packed weight has. The PTX
// manual advises it for performance.
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

// The element types of both kernels, with the conversions and products of their bit patterns.

struct Bf16Element {
  __device__ static float to_float(uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
  __device__ static uint16_t from_float(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
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
  __device__ static float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  __device__ static uint16_t from_float(float x) { return __half_as_ushort(__float2half_rn(x)); }
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
