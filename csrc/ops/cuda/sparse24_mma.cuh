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
// ldmatrix.x4 loads four matrices of eight rows of 16 bytes from shared memory: lane 8 m + i gives the
// address of row i of matrix m, and gets columns 2 t, 2 t + 1 of row g of each matrix. So it loads operand A
// of both instructions, and operand B where B lies transposed. ldmatrix.x4.trans transposes each matrix: the
// lane gets rows 2 t, 2 t + 1 of column g, as of operand B where B lies by rows.
//
// sparse24_skinny multiplies 64 columns of W, 16 groups per row, by two products of mma.sp. The 8 bytes of
// positions of a row are the metadata of both: lane t has groups 4 t … 4 t + 3, and product s reads those of
// lanes 2 s and 2 s + 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/cuda/shared_address.cuh"

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

// loaded: the two elements of this lane in each of four matrices in shared memory. row: the address that this
// lane gives, aligned to 16 bytes.
__device__ inline void load_matrices(uint32_t (&loaded)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(loaded[0]), "=r"(loaded[1]), "=r"(loaded[2]), "=r"(loaded[3])
               : "r"(row)
               : "memory");
}

// The same of the four matrices transposed.
__device__ inline void load_transposed(uint32_t (&loaded)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(loaded[0]), "=r"(loaded[1]), "=r"(loaded[2]), "=r"(loaded[3])
               : "r"(row)
               : "memory");
}

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
