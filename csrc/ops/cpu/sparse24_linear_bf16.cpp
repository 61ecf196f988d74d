// sparse24_linear in bf16 for few tokens, on a CPU with the instructions of AVX-512 VBMI2 (vpexpandw: the
// columns of packed values) and AVX-512 BF16 (vdpbf16ps: 32 products at a time, added in fp32). It is
// compiled for such a CPU alone; sparse24_linear.cpp asks has_bf16_products() before each call.
#if defined(__x86_64__)

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/cpu/sparse24_linear_lanes.h"
#include "ops/cpu/sparse24_linear_simd.h"

namespace drot::DROT_SIMD {
namespace {

// Rows of W and tokens that are multiplied together in registers: 20 sums, four vectors of W and one of x.
constexpr int kRows = 4, kTokens = kTogether24;
// kRows rows of W are made dense, kTileColumns at a time: this tile stays in the L1 cache. kBlockRows rows
// take their turn before the next columns, so that these columns of x, which stay in the L2 cache, are read
// from memory once for all of them.
constexpr int kBlockRows = kRows24, kTileColumns = 1024;
constexpr int kTileStride = kTileColumns + kPaddingBf16;  // rows at a power of two would share cache lines
static_assert(kBlockRows % kRows == 0 && kTileColumns % kPaddingBf16 == 0);

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
__m512i columns_of(__m512i positions) {
  const __m512i bits = _mm512_load_si512(kColumnBits.at), low = _mm512_set1_epi8(15);
  const __m512i first = _mm512_shuffle_epi8(bits, _mm512_and_si512(positions, low));
  const __m512i second = _mm512_shuffle_epi8(bits, _mm512_and_si512(_mm512_srli_epi16(positions, 4), low));
  return _mm512_or_si512(first, _mm512_slli_epi16(second, 4));
}

// `bytes` times eight columns, and zeros up to a multiple of 32 columns.
void expand_row(const Bf16* values, const uint8_t* positions, int64_t bytes, Bf16* to) {
  constexpr int64_t kBytes = 64, kVector = 4;  // bytes of positions: together, and of one vector of columns
  const auto expand = [to](int64_t byte, uint32_t columns, __m256i packed) {
    const __m512i wide = _mm512_castsi256_si512(packed);
    _mm512_storeu_si512(to + 8 * byte, _mm512_maskz_expand_epi16(columns, wide));
  };
  for (int64_t start = 0; start < bytes; start += kBytes) {
    const int64_t count = least(kBytes, bytes - start);
    alignas(64) uint32_t columns[kBytes / kVector];
    const __mmask64 read = count < kBytes ? (__mmask64{1} << count) - 1 : ~__mmask64{0};
    _mm512_store_si512(columns, columns_of(_mm512_maskz_loadu_epi8(read, positions + start)));
    int64_t i = 0;
    for (; i + kVector <= count; i += kVector) {
      expand(start + i, columns[i / kVector],
             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 4 * (start + i))));
    }
    if (i < count) {
      const auto rest = static_cast<__mmask16>((1 << 4 * (count - i)) - 1);
      expand(start + i, columns[i / kVector], _mm256_maskz_loadu_epi16(rest, values + 4 * (start + i)));
    }
  }
}

__m512bh load_bf16(const Bf16* from) {
  __m512bh vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// sums [kRows][kTokensNow] += tile · xᵀ in each lane, over all columns. x: as group_tokens makes it.
template <int kTokensNow>
void tile_products(const Bf16* tile, const Bf16* x, int64_t columns, Lanes* sums) {
  Lanes sum[kRows][kTokensNow];
  std::memcpy(sum, sums, sizeof(sum));
  for (int64_t column = 0; column < columns; column += kPaddingBf16, x += kTokensNow * kPaddingBf16) {
    __m512bh w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = load_bf16(tile + r * kTileStride + column);
    for (int t = 0; t < kTokensNow; ++t) {
      const __m512bh xs = load_bf16(x + t * kPaddingBf16);
      for (int r = 0; r < kRows; ++r) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], w[r], xs);
    }
  }
  std::memcpy(sums, sum, sizeof(sum));
}

void tile_products(int64_t tokens, const Bf16* tile, const Bf16* x, int64_t columns, Lanes* sums) {
  switch (tokens) {
    case 1:
      return tile_products<1>(tile, x, columns, sums);
    case 2:
      return tile_products<2>(tile, x, columns, sums);
    case 3:
      return tile_products<3>(tile, x, columns, sums);
    case 4:
      return tile_products<4>(tile, x, columns, sums);
    default:
      return tile_products<kTokens>(tile, x, columns, sums);
  }
}

void block_products(const Sparse24Rows<Bf16, Bf16>& p, int64_t row, int64_t rows) {
  alignas(64) Bf16 tile[kRows * kTileStride];
  alignas(64) Lanes sums[kBlockRows * kTokens];  // [rows / kRows][kRows][tokens]
  std::fill_n(sums, (rows + kRows - 1) / kRows * kRows * p.tokens, all(0));
  std::memset(tile, 0, sizeof(tile));  // rows after the last one are zeros
  for (int64_t column = 0; column < p.in; column += kTileColumns) {
    const int64_t columns = least(kTileColumns, p.in - column);
    for (int64_t r = 0; r < rows; r += kRows) {
      for (int64_t i = r; i < least(rows, r + kRows); ++i) {
        const int64_t at = (row + i) * p.in + column;
        expand_row(p.values + at / 2, p.positions + at / 8, columns / 8, tile + (i - r) * kTileStride);
      }
      // the hardware prefetcher does not find the next tile; these loads run beside the products
      for (int64_t i = 0; i < kRows; ++i) {
        const int64_t next = (row + kBlockRows + r + i) * p.in + column;  // beyond the end it is harmless
        prefetch_block<2>(p.values + next / 2, columns / 2);
        prefetch_block<2>(p.positions + next / 8, columns / 8);
      }
      tile_products(p.tokens, tile, p.x + column * p.tokens, columns, sums + r * p.tokens);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < p.tokens; ++t) finish(p, row + r, t, sum_of(sums[r * p.tokens + t]));
  }
}

}  // namespace

void group_tokens(const Bf16* x, int64_t stride, int64_t tokens, int64_t in, Bf16* to) {
  for (int64_t column = 0; column < in; column += kPaddingBf16) {
    const auto read = static_cast<__mmask32>((uint64_t{1} << least(kPaddingBf16, in - column)) - 1);
    for (int64_t t = 0; t < tokens; ++t, to += kPaddingBf16) {
      _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(read, x + t * stride + column));
    }
  }
}

void sparse24_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last) {
  for (; first < last; first += kBlockRows) block_products(p, first, least(kBlockRows, last - first));
}

}  // namespace drot::DROT_SIMD

#endif
