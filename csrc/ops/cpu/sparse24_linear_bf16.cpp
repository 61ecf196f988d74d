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
// columns of x of these tokens stay in the L2 cache.
constexpr int kTileRows = kRows24, kTileColumns = 1024, kTileTokens = 48;
constexpr int kTileStride = static_cast<int>(bf16_stride(kTileColumns));
static_assert(kTileTokens % kTokens == 0 && kTileRows % kRows == 0 && kTileColumns % kPaddingBf16 == 0);

// For each byte of positions: the bits of the columns, of eight, that its four values have.
struct ColumnMasks {
  uint8_t at[256];
};
constexpr ColumnMasks column_masks() {
  ColumnMasks masks{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int value = 0; value < 4; ++value) {
      masks.at[byte] |= static_cast<uint8_t>(1 << (4 * (value / 2) + (byte >> (2 * value) & 3)));
    }
  }
  return masks;
}
constexpr auto kMasks = column_masks();

// 32 columns from 16 values and four bytes of positions.
__m512i expand32(const Bf16* values, const uint8_t* positions) {
  const __mmask32 columns = static_cast<uint32_t>(kMasks.at[positions[0]]) |
                            static_cast<uint32_t>(kMasks.at[positions[1]]) << 8 |
                            static_cast<uint32_t>(kMasks.at[positions[2]]) << 16 |
                            static_cast<uint32_t>(kMasks.at[positions[3]]) << 24;
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_maskz_expand_epi16(columns, _mm512_castsi256_si512(packed));
}

// `bytes` times eight columns, and zeros up to a multiple of 32 columns.
void expand_row(const Bf16* values, const uint8_t* positions, int64_t bytes, Bf16* to) {
  int64_t i = 0;
  for (; i + 4 <= bytes; i += 4) _mm512_storeu_si512(to + 8 * i, expand32(values + 4 * i, positions + i));
  if (i < bytes) {
    Bf16 last_values[16] = {};
    uint8_t last_positions[4] = {};
    std::memcpy(last_values, values + 4 * i, 4 * (bytes - i) * sizeof(Bf16));
    std::memcpy(last_positions, positions + i, bytes - i);
    _mm512_storeu_si512(to + 8 * i, expand32(last_values, last_positions));
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

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
    for (int64_t r = 0; r < rows; r += kRows) {
      for (int64_t t = 0; t < tokens; t += kTokens) {
        tile_products(least(kTokens, tokens - t), tile + r * kTileStride,
                      p.x + (token + t) * stride + column, stride, columns, sums[r / kRows] + t * kRows);
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
