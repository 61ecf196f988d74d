// A vector of fp32, Lanes, and its load from kLanes columns of a packed 2:4 row, with zeros for the pruned
// columns. Used by ops/cpu/sparse24_linear_simd.cpp and sparse24_linear_bf16.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/cpu/float_rows.h"
#include "ops/cpu/sparse24_linear_simd.h"
#include "ops/pack24_math.h"

namespace drot::DROT_SIMD {
namespace {

#if defined(__AVX2__)

// For each byte of positions (eight columns): the control of the byte shuffle that moves four 16-bit values
// to their columns, of kBytes bytes each. A control byte with its high bit set gives a zero byte.
template <int kBytes>
struct ByteShuffles {
  alignas(32) uint8_t at[256][8 * kBytes];
};
template <int kBytes>
constexpr ByteShuffles<kBytes> byte_shuffles() {
  ByteShuffles<kBytes> table{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int i = 0; i < 8 * kBytes; ++i) table.at[byte][i] = 0x80;
    for (int value = 0; value < 4; ++value) {
      const int column = 4 * (value / 2) + (byte >> (2 * value) & 3);
      // a bf16 is the upper half of an fp32, an fp16 is converted after the shuffle
      uint8_t* const low = table.at[byte] + kBytes * column + kBytes - 2;
      low[0] = static_cast<uint8_t>(2 * value);
      low[1] = static_cast<uint8_t>(2 * value + 1);
    }
  }
  return table;
}
// For fp32 values: the indices of a permutation of [4 values, 4 zeros]; index 4 is a zero.
struct WordShuffles {
  alignas(32) uint32_t at[256][8];
};
constexpr WordShuffles word_shuffles() {
  WordShuffles table{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int i = 0; i < 8; ++i) table.at[byte][i] = 4;
    for (int value = 0; value < 4; ++value) {
      table.at[byte][4 * (value / 2) + (byte >> (2 * value) & 3)] = static_cast<uint32_t>(value);
    }
  }
  return table;
}
constexpr auto kBf16Shuffles = byte_shuffles<4>();
constexpr auto kFp16Shuffles = byte_shuffles<2>();
constexpr auto kFloatShuffles = word_shuffles();

// Eight columns in fp32 from four values and their byte of positions.
DROT_HOST_DEVICE __m256 expand8(const Bf16* values, uint8_t position) {
  long long four;
  std::memcpy(&four, values, sizeof(four));
  const auto control = _mm256_load_si256(reinterpret_cast<const __m256i*>(kBf16Shuffles.at[position]));
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_set1_epi64x(four), control));
}
DROT_HOST_DEVICE __m256 expand8(const Fp16* values, uint8_t position) {
  const auto four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
  const auto control = _mm_load_si128(reinterpret_cast<const __m128i*>(kFp16Shuffles.at[position]));
  return _mm256_cvtph_ps(_mm_shuffle_epi8(four, control));
}
DROT_HOST_DEVICE __m256 expand8(const float* values, uint8_t position) {
  const auto control = _mm256_load_si256(reinterpret_cast<const __m256i*>(kFloatShuffles.at[position]));
  return _mm256_permutevar8x32_ps(_mm256_zextps128_ps256(_mm_loadu_ps(values)), control);
}

DROT_HOST_DEVICE __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
DROT_HOST_DEVICE __m256 load8(const Bf16* from) {
  const auto bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
DROT_HOST_DEVICE __m256 load8(const Fp16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

DROT_HOST_DEVICE float sum8(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Lanes = __m512;

DROT_HOST_DEVICE Lanes halves(__m256 low, __m256 high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
template <class V>
DROT_HOST_DEVICE Lanes expand(const V* values, const uint8_t* positions) {
  return halves(expand8(values, positions[0]), expand8(values + 4, positions[1]));
}
// The last eight columns of a row whose length is no multiple of kLanes.
template <class V>
DROT_HOST_DEVICE Lanes expand_half(const V* values, const uint8_t* positions) {
  return halves(expand8(values, positions[0]), _mm256_setzero_ps());
}
template <class V>
DROT_HOST_DEVICE Lanes load(const V* from) {
  return halves(load8(from), load8(from + 8));
}
DROT_HOST_DEVICE Lanes load(const float* from) { return _mm512_loadu_ps(from); }
DROT_HOST_DEVICE void store(Lanes x, float* to) { _mm512_storeu_ps(to, x); }
DROT_HOST_DEVICE Lanes all(float x) { return _mm512_set1_ps(x); }
DROT_HOST_DEVICE Lanes add_product(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
DROT_HOST_DEVICE float sum_of(Lanes x) {
  // GCC 12 warns about its own header for _mm512_extractf32x8_ps
  alignas(64) float at[kLanes];
  _mm512_store_ps(at, x);
  return sum8(_mm256_add_ps(_mm256_load_ps(at), _mm256_load_ps(at + 8)));
}

#if defined(__AVX512BF16__)
DROT_HOST_DEVICE __m512bh as_bf16(__m512i bits) {
  __m512bh vector;
  std::memcpy(&vector, &bits, sizeof(vector));
  return vector;
}
#endif

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using Lanes = __m256;

template <class V>
DROT_HOST_DEVICE Lanes expand(const V* values, const uint8_t* positions) {
  return expand8(values, positions[0]);
}
template <class V>
DROT_HOST_DEVICE Lanes load(const V* from) {
  return load8(from);
}
DROT_HOST_DEVICE void store(Lanes x, float* to) { _mm256_storeu_ps(to, x); }
DROT_HOST_DEVICE Lanes all(float x) { return _mm256_set1_ps(x); }
DROT_HOST_DEVICE Lanes add_product(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
DROT_HOST_DEVICE float sum_of(Lanes x) { return sum8(x); }

#else

constexpr int kLanes = 8;
struct Lanes {
  float at[kLanes];
};

template <class V>
DROT_HOST_DEVICE Lanes expand(const V* values, const uint8_t* positions) {
  Lanes out{};
  for (int i = 0; i < 4; ++i) out.at[4 * (i / 2) + (positions[0] >> (2 * i) & 3)] = widen(values[i]);
  return out;
}
template <class V>
DROT_HOST_DEVICE Lanes load(const V* from) {
  Lanes out;
  for (int i = 0; i < kLanes; ++i) out.at[i] = widen(from[i]);
  return out;
}
DROT_HOST_DEVICE void store(const Lanes& x, float* to) { std::memcpy(to, x.at, sizeof(x)); }
DROT_HOST_DEVICE Lanes all(float x) {
  Lanes out;
  for (float& lane : out.at) lane = x;
  return out;
}
DROT_HOST_DEVICE Lanes add_product(const Lanes& a, const Lanes& b, Lanes sum) {
  for (int i = 0; i < kLanes; ++i) sum.at[i] += a.at[i] * b.at[i];
  return sum;
}
DROT_HOST_DEVICE float sum_of(const Lanes& x) {
  return ((x.at[0] + x.at[4]) + (x.at[2] + x.at[6])) + ((x.at[1] + x.at[5]) + (x.at[3] + x.at[7]));
}

#endif

#if !defined(__AVX512F__)
template <class V>
DROT_HOST_DEVICE Lanes expand_half(const V* values, const uint8_t* positions) {
  return expand(values, positions);
}
#endif

// What a loop over the columns of `rows` rows reads after `at`, counted from the begin of a row. At the end
// of these rows that is the begin of the rows behind them; behind the last rows a prefetch is harmless.
// length: of a row.
DROT_HOST_DEVICE int64_t ahead24(int64_t at, int64_t length, int rows) {
  return at < length ? at : (rows - 1) * length + at;
}

// y[token, row] = the sum y plus everything that is added to it.
template <class V, class X>
DROT_HOST_DEVICE void finish(const Sparse24Rows<V, X>& p, int64_t row, int64_t token, float y) {
  const int64_t at = token * p.out + row;
  if (p.bias) y += widen(p.bias[row]);
  if (p.residual) y += widen(p.residual[at]);
  if (p.rotated) y += p.rotated[at];
  p.y[at] = narrow(y, V{});
}

}  // namespace
}  // namespace drot::DROT_SIMD
