// What the kernels of sparse24_linear in bf16 share: columns of packed values by AVX-512 VBMI2 (vpexpandw),
// and 16 results at a time. Used by the files that are compiled for such a CPU alone (CMakeLists.txt).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ops/cpu/sparse24_linear_lanes.h"

namespace drot::DROT_SIMD {
namespace {

// Nibble of positions → the bits of the columns, of four, that its two values have; once for each 16 bytes.
struct ColumnBits {
  alignas(64) uint8_t at[64];
};
constexpr ColumnBits column_bits() {
  ColumnBits bits{};
  for (int i = 0; i < 64; ++i) bits.at[i] = static_cast<uint8_t>(1 << (i & 3) | 1 << (i >> 2 & 3));
  return bits;
}
constexpr auto kColumnBits = column_bits();

// For 64 bytes of positions: the bits of the columns, of eight, that the four values of a byte have.
DROT_HOST_DEVICE __m512i columns_of(__m512i positions) {
  const __m512i bits = _mm512_load_si512(kColumnBits.at), low = _mm512_set1_epi8(15);
  const __m512i first = _mm512_shuffle_epi8(bits, _mm512_and_si512(positions, low));
  const __m512i second = _mm512_shuffle_epi8(bits, _mm512_and_si512(_mm512_srli_epi16(positions, 4), low));
  return _mm512_or_si512(first, _mm512_slli_epi16(second, 4));
}

// Bytes of positions of a vector of kPaddingBf16 columns.
constexpr int64_t kExpandedBytes = 4;

// A vector of columns: `bytes`, at most kExpandedBytes, times four values in their columns, and zeros.
DROT_HOST_DEVICE __m512i expand(uint32_t columns, const Bf16* values, int64_t bytes) {
  const auto read = static_cast<__mmask16>((1 << 4 * bytes) - 1);
  const __m256i packed = bytes < kExpandedBytes
                             ? _mm256_maskz_loadu_epi16(read, values)
                             : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_maskz_expand_epi16(columns, _mm512_castsi256_si512(packed));
}

// from[0], from[kStride], …
template <int kStride>
DROT_HOST_DEVICE Lanes column_of(const float* from) {
  const __m512i rows = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_i32gather_ps(_mm512_mullo_epi32(rows, _mm512_set1_epi32(kStride)), from, sizeof(float));
}

// `finish` for kLanes rows.
DROT_HOST_DEVICE void finish_lanes(const Sparse24Rows<Bf16, Bf16>& p, int64_t row, int64_t token, Lanes y) {
  const int64_t at = token * p.out + row;
  if (p.bias) y = _mm512_add_ps(y, load(p.bias + row));
  if (p.residual) y = _mm512_add_ps(y, load(p.residual + at));
  if (p.rotated) y = _mm512_add_ps(y, load(p.rotated + at));
  const __m256bh narrow = _mm512_cvtneps_pbh(y);
  std::memcpy(p.y + at, &narrow, sizeof(narrow));
}

}  // namespace
}  // namespace drot::DROT_SIMD
