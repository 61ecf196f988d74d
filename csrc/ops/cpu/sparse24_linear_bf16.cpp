// sparse24_linear in bf16 on a CPU with the instructions of AVX-512 VBMI2 (vpexpandw: the columns of packed
// values) and AVX-512 BF16 (vdpbf16ps: 32 products at a time, added in fp32). It is compiled for such a CPU
// alone; sparse24_linear.cpp asks has_bf16_products() before each call.
#if defined(__x86_64__)

#include <cstdint>
#include <cstring>

#include "ops/cpu/sparse24_linear_lanes.h"
#include "ops/cpu/sparse24_linear_simd.h"

namespace drot::DROT_SIMD {
namespace {

// Rows of W and tokens that are multiplied together in registers: 24 sums, four vectors of W and one of x.
constexpr int kRows = 4, kTokens = 6;
// kTileRows rows of W are made dense, kTileColumns at a time, for up to kTileTokens tokens. The tile and the
// columns of x of kTokens tokens stay in the L1 cache, and those of kTileTokens tokens in the L2 cache.
constexpr int kTileRows = kRows24, kTileColumns = 512, kTileTokens = 48;
constexpr int kTileStride = static_cast<int>(bf16_stride(kTileColumns));
static_assert(kTileTokens % kTokens == 0 && kTileRows % kRows == 0 && kTileColumns % kPaddingBf16 == 0);

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
    alignas(64) uint8_t read[kBytes] = {};
    std::memcpy(read, positions + start, count);
    _mm512_store_si512(columns, columns_of(_mm512_load_si512(read)));
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

// sums [kRows][kTokensNow] += tile · xᵀ in each lane, over all columns.
template <int kTokensNow>
void tile_products(const Bf16* tile, const Bf16* x, int64_t stride, int64_t columns, Lanes* sums) {
  Lanes sum[kRows][kTokensNow];
  std::memcpy(sum, sums, sizeof(sum));
  for (int64_t column = 0; column < columns; column += kPaddingBf16) {
    __m512bh w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = load_bf16(tile + r * kTileStride + column);
    for (int t = 0; t < kTokensNow; ++t) {
      const __m512bh xs = load_bf16(x + t * stride + column);
      for (int r = 0; r < kRows; ++r) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], w[r], xs);
    }
  }
  std::memcpy(sums, sum, sizeof(sum));
}

void tile_products(int64_t tokens, const Bf16* tile, const Bf16* x, int64_t stride, int64_t columns,
                   Lanes* sums) {
  switch (tokens) {
    case 1:
      return tile_products<1>(tile, x, stride, columns, sums);
    case 2:
      return tile_products<2>(tile, x, stride, columns, sums);
    case 3:
      return tile_products<3>(tile, x, stride, columns, sums);
    case 4:
      return tile_products<4>(tile, x, stride, columns, sums);
    case 5:
      return tile_products<5>(tile, x, stride, columns, sums);
    default:
      return tile_products<kTokens>(tile, x, stride, columns, sums);
  }
}

void tiled_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t row, int64_t rows, int64_t token, int64_t tokens) {
  alignas(64) Bf16 tile[kTileRows * kTileStride];
  alignas(64) Lanes sums[kTileRows / kRows][kRows * kTileTokens];
  const int64_t stride = bf16_stride(p.in);
  for (auto& of_rows : sums) {
    for (auto& lanes : of_rows) lanes = all(0);
  }
  std::memset(tile, 0, sizeof(tile));  // rows after the last one are zeros
  for (int64_t column = 0; column < p.in; column += kTileColumns) {
    const int64_t columns = least(kTileColumns, p.in - column);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * p.in + column;
      // the hardware prefetcher does not find the next tile
      prefetch_block(p.values + (at + kTileColumns) / 2, kTileColumns / 2);
      prefetch_block(p.positions + (at + kTileColumns) / 8, kTileColumns / 8);
      expand_row(p.values + at / 2, p.positions + at / 8, columns / 8, tile + r * kTileStride);
    }
    for (int64_t t = 0; t < tokens; t += kTokens) {
      for (int64_t r = 0; r < rows; r += kRows) {
        tile_products(least(kTokens, tokens - t), tile + r * kTileStride, p.x + (token + t) * stride + column,
                      stride, columns, sums[r / kRows] + t * kRows);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t first = t / kTokens * kTokens, together = least(kTokens, tokens - first);
      const Lanes sum = sums[r / kRows][first * kRows + r % kRows * together + t - first];
      finish(p, row + r, token + t, sum_of(sum));
    }
  }
}

}  // namespace

void sparse24_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last) {
  for (; first < last; first += kTileRows) {
    for (int64_t token = 0; token < p.tokens; token += kTileTokens) {
      tiled_rows(p, first, least(kTileRows, last - first), token, least(kTileTokens, p.tokens - token));
    }
  }
}

void expand_bytes(const Bf16* values, const uint8_t* positions, int64_t bytes, Bf16* to) {
  const int64_t whole = bytes / 4 * 4;
  expand_row(values, positions, whole, to);
  if (whole < bytes) {  // `to` has no room for a whole vector
    Bf16 last[kPaddingBf16];
    expand_row(values + 4 * whole, positions + whole, bytes - whole, last);
    std::memcpy(to + 8 * whole, last, 8 * (bytes - whole) * sizeof(Bf16));
  }
}

}  // namespace drot::DROT_SIMD

#endif
