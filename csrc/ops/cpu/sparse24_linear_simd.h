// The part of the CPU kernel of sparse24_linear that is compiled for each instruction set
// (common/cpu/simd.h). V is Bf16, Fp16 or float.
#pragma once

#include <cstdint>

#include "common/cpu/simd.h"

namespace drot {

struct Bf16;  // common/cpu/float_rows.h

// The rows of x in fp32 are padded with zeros to a multiple of this many columns.
constexpr int64_t kPadding24 = 16;
// A call of sparse24_rows is fastest for a multiple of this many rows of W.
constexpr int kRows24 = 16;

// X is the type of x: rows of padded24(in) elements as float, what group_tokens or pair_tokens makes as Bf16.
template <class V, class X = float>
struct Sparse24Rows {
  const V* values;           // [out, in/2]
  const uint8_t* positions;  // [out, in/8]
  const X* x;                // [tokens, in], padded or in groups
  const V* bias;             // [out] or null
  const V* residual;         // [tokens, out] or null
  const float* rotated;      // [tokens, out] or null
  V* y;                      // [tokens, out]
  int64_t tokens, in, out;
};

template <class V>
struct RotatedColumns {
  const float* x;    // [tokens, padded n]
  const V* columns;  // [n, n]: the columns of the rotation, one after the other
  float* y;          // [tokens, n]: x · rotation
  int64_t tokens, n;
};

constexpr int64_t padded24(int64_t columns) { return (columns + kPadding24 - 1) / kPadding24 * kPadding24; }

// x in bf16 for sparse24_rows: at most kTogether24 tokens, whose vectors of kPaddingBf16 columns follow each
// other; the last columns are padded with zeros.
constexpr int64_t kPaddingBf16 = 32;
constexpr int kTogether24 = 6;
constexpr int64_t padded_bf16(int64_t columns) {
  return (columns + kPaddingBf16 - 1) / kPaddingBf16 * kPaddingBf16;
}

// Tokens of a vector and of the largest block of sparse24_token_rows.
constexpr int kVectorTokens24 = 16, kBlockTokens24 = 4 * kVectorTokens24;

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

#if defined(__x86_64__)
// For a CPU with bf16 products.
namespace drot::avx512bf16 {
// x [tokens, in], `stride` values between tokens, tokens ≤ kTogether24, as sparse24_rows reads it:
// padded_bf16(in) values a token. `to` is aligned to 64 bytes.
void group_tokens(const Bf16* x, int64_t stride, int64_t tokens, int64_t in, Bf16* to);
// Computes y for the rows first … last - 1 of W (sparse24_linear_bf16.cpp).
void sparse24_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last);
// Where pair_tokens writes: a vector has two columns of kVectorTokens24 tokens. The second two columns of a
// group of four lie behind the first two.
struct PairStrides {
  int64_t group, vector;  // vectors between two groups of columns, and between two vectors of tokens
};
// The columns first … last - 1, multiples of 8, of x [tokens, in], `stride` values between tokens, in vectors
// of tokens. Tokens up to a multiple of kVectorTokens24 are zeros. `to` begins with column 0 and is aligned
// to 64 bytes.
void pair_tokens(const Bf16* x, int64_t stride, int64_t tokens, int64_t first, int64_t last,
                 PairStrides strides, Bf16* to);
// Computes y for the rows first … last - 1 of W, for a block of at most kBlockTokens24 tokens
// (sparse24_linear_bf16_tokens.cpp). p.x: PairStrides{2 · vectors of tokens, 2}.
void sparse24_token_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last);
}  // namespace drot::avx512bf16

// For a CPU with matrix instructions for bf16 (sparse24_linear_amx.cpp).
namespace drot::amx {
// The most tokens of a call: more of them and their sums would leave the L2 cache.
constexpr int64_t kBlockTokens24 = 512;
int64_t scratch_bytes(int64_t tokens);
// Computes y for the rows first … last - 1 of W. p.x: PairStrides{2, padded_bf16(in) / 2}, in columns up to
// padded_bf16(in), which are zeros. scratch: scratch_bytes(p.tokens) of this thread alone.
void sparse24_token_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last, char* scratch);
}  // namespace drot::amx
#endif
