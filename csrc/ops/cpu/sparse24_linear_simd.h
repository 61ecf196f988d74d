// The part of the CPU kernel of sparse24_linear that is compiled for each instruction set
// (common/cpu/simd.h). V is Bf16, Fp16 or float.
#pragma once

#include <cstdint>

#include "common/cpu/simd.h"

namespace drot {

// The rows of x in fp32 are padded with zeros to a multiple of this many columns.
constexpr int64_t kPadding24 = 16;
// A call of sparse24_rows is fastest for a multiple of this many rows of W.
constexpr int kRows24 = 16;

template <class V>
struct Sparse24Rows {
  const V* values;           // [out, in/2]
  const uint8_t* positions;  // [out, in/8]
  const float* x;            // [tokens, padded in]
  const V* bias;             // [out] or null
  const V* residual;         // [tokens, out] or null
  const float* rotated;      // [tokens, out] or null
  V* y;                      // [tokens, out]
  int64_t tokens, in, out;
};

template <class V>
struct RotatedColumns {
  const float* x;     // [tokens, padded n]
  const V* rotation;  // [n, n]
  float* y;           // [tokens, n]: x · rotation
  int64_t tokens, n;
};

constexpr int64_t padded24(int64_t columns) { return (columns + kPadding24 - 1) / kPadding24 * kPadding24; }

}  // namespace drot

// Computes y for the rows first … last - 1 of W.
DROT_SIMD_DECLARE(template <class V>
                  void sparse24_rows(const Sparse24Rows<V>& p, int64_t first, int64_t last))
// Computes the columns first … last - 1 of y.
DROT_SIMD_DECLARE(template <class V>
                  void rotate_columns(const RotatedColumns<V>& p, int64_t first, int64_t last))
// from [rows, columns], `stride` values between rows -> fp32 [rows, padded columns].
DROT_SIMD_DECLARE(template <class V>
                  void widen_rows(const V* from, int64_t stride, int64_t rows, int64_t columns, float* to))
// values [4 · bytes], positions [bytes] -> `bytes` times eight dense columns in fp32.
DROT_SIMD_DECLARE(template <class V>
                  void expand_bytes(const V* values, const uint8_t* positions, int64_t bytes, float* to))
