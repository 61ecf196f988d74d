// One thread's work on one small matrix, in the best instruction set of the machine.
#pragma once

#include "common/simd.h"

namespace drot {

// Rows of a work matrix are padded to this many elements.
constexpr int kQrPad = 16;

}  // namespace drot

// a [n, n] row-major -> q, r [n, n] row-major. work: (2 ld + 1) ld elements aligned to 64 bytes, where
// ld is n rounded up to kQrPad.
DROT_SIMD_DECLARE(void small_qr(const float* a, float* q, float* r, float* work, int n))
DROT_SIMD_DECLARE(void small_qr(const double* a, double* q, double* r, double* work, int n))

// x r'ᵀ = b for one upper triangular r [n, n]: bt [n, n] = bᵀ becomes xᵀ, and x is written.
DROT_SIMD_DECLARE(void small_solve(const float* r, float* bt, float* x, int n))
DROT_SIMD_DECLARE(void small_solve(const double* r, double* bt, double* x, int n))
