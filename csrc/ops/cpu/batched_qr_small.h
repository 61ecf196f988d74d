// The part of the CPU kernel of batched_qr that is compiled for each instruction set (common/cpu/simd.h): one
// small matrix on one thread.
#pragma once

#include "common/cpu/simd.h"

namespace drot {

// Columns of the work matrices are padded to a multiple of this many elements.
constexpr int kQrPad = 16;

}  // namespace drot

// a [n, n] row-major -> q, r [n, n] row-major. work: (2 ld + 1) ld elements aligned to 64 bytes, where ld is
// n rounded up to a multiple of kQrPad.
DROT_SIMD_DECLARE(void small_qr(const float* a, float* q, float* r, float* work, int n))
DROT_SIMD_DECLARE(void small_qr(const double* a, double* q, double* r, double* work, int n))

// Solves x rᵀ = b for an upper triangular r [n, n]. bt [n, n]: bᵀ, replaced by xᵀ. x [n, n]: the solution.
DROT_SIMD_DECLARE(void small_solve(const float* r, float* bt, float* x, int n))
DROT_SIMD_DECLARE(void small_solve(const double* r, double* bt, double* x, int n))
