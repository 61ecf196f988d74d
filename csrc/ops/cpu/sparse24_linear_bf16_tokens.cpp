// sparse24_linear in bf16 for many tokens, on a CPU with the instructions of AVX-512 BF16. Each lane of a
// vector is a token, so a product takes any two of four columns: x is kept in all six pairs of them, and the
// pruned weights cost neither products nor memory. It is compiled for such a CPU alone; sparse24_linear.cpp
// asks has_bf16_products() before each call.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "ops/cpu/sparse24_linear_bf16.h"
#include "ops/cpu/sparse24_linear_simd.h"

namespace drot::DROT_SIMD {
namespace {

// Two columns that a group of four keeps, in the order of the pairs in a table.
constexpr int kPairs = 6;
// The pair of a nibble of positions, `first | second << 2`. Nibbles that pack24 does not make have some pair.
constexpr uint8_t kPairOf[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 0, 0, 2, 4, 5, 0};
// Bytes of the pairs of kColumns columns. With the next rows of W and their sums they stay in the L1 cache.
constexpr int kTableBytes = 24 * 1024;
constexpr int kVectorBytes = 64, kTokensInVector = kVectorTokens24;
// Rows of W that are multiplied together: their sums fill at most 16 of 32 registers.
constexpr int kRows = 4;
// Rows of W that are multiplied before the table gets the next columns.
constexpr int kTableRows = 256;
static_assert(kTableRows % kRows == 0);

// A block of kVectors vectors of tokens.
template <int kVectors>
struct Block {
  // columns whose pairs lie in the table at a time
  static constexpr int kColumns = kVectors == 1 ? 256 : kVectors == 2 ? 128 : 64;
  static constexpr int kGroups = kColumns / 4;
  static constexpr int kPairBytes = kVectors * kVectorBytes;
  static_assert(kGroups * kPairs * kPairBytes <= kTableBytes);
  // byte of positions → where the pairs of its two groups begin, counted from the pairs of each group
  static constexpr std::array<uint32_t, 256> offsets() {
    std::array<uint32_t, 256> at{};
    for (int byte = 0; byte < 256; ++byte) {
      at[byte] = static_cast<uint32_t>(kPairOf[byte & 15] * kPairBytes |
                                       (kPairs + kPairOf[byte >> 4]) * kPairBytes << 16);
    }
    return at;
  }
};
template <int kVectors>
constexpr auto kOffsets = Block<kVectors>::offsets();

__m512bh broadcast_pair(const Bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return as_bf16(_mm512_set1_epi32(pair));
}

// The six pairs of each group of four columns. x: two vectors of pairs, of the columns 0, 1 and 2, 3 of the
// group, for each vector of tokens.
template <int kVectors>
void make_pairs(const Bf16* x, int64_t groups, char* table) {
  constexpr int64_t kPairBytes = Block<kVectors>::kPairBytes;
  constexpr __mmask32 kSecond = 0xAAAAAAAA;
  for (int64_t i = 0; i < groups * kVectors; ++i, x += 2 * 32) {
    const __m512i x01 = _mm512_load_si512(x), x23 = _mm512_load_si512(x + 32);
    const __m512i x_0 = _mm512_srli_epi32(x01, 16), x_2 = _mm512_slli_epi32(x23, 16);
    char* const to = table + i / kVectors * kPairs * kPairBytes + i % kVectors * kVectorBytes;
    _mm512_store_si512(to, x01);
    _mm512_store_si512(to + kPairBytes, _mm512_mask_blend_epi16(kSecond, x01, x_2));
    _mm512_store_si512(to + 2 * kPairBytes, _mm512_mask_blend_epi16(kSecond, x01, x23));
    _mm512_store_si512(to + 3 * kPairBytes, _mm512_mask_blend_epi16(kSecond, x_0, x_2));
    _mm512_store_si512(to + 4 * kPairBytes, _mm512_mask_blend_epi16(kSecond, x_0, x23));
    _mm512_store_si512(to + 5 * kPairBytes, x23);
  }
}

// A few rows of W, in the columns whose pairs lie in the table.
template <int kVectors>
struct Tile {
  alignas(64) Bf16 values[kRows][Block<kVectors>::kColumns / 2];
  uint8_t positions[kRows][Block<kVectors>::kColumns / 8];
};

// sums [kRows][kVectors] += W · x over the columns of the table.
template <int kVectors>
void add_products(const Tile<kVectors>& tile, int64_t groups, const char* table, Lanes* sums) {
  Lanes sum[kRows][kVectors];
  std::memcpy(sum, sums, sizeof(sum));
  for (int64_t group = 0; group < groups; group += 2, table += 2 * kPairs * Block<kVectors>::kPairBytes) {
    for (int r = 0; r < kRows; ++r) {
      const uint32_t at = kOffsets<kVectors>[tile.positions[r][group / 2]];
      for (int half = 0; half < 2; ++half) {
        const __m512bh w = broadcast_pair(tile.values[r] + 2 * (group + half));
        const char* const x = table + (half ? at >> 16 : at & 0xFFFF);
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = _mm512_dpbf16_ps(sum[r][v], w, as_bf16(_mm512_load_si512(x + v * kVectorBytes)));
        }
      }
    }
  }
  std::memcpy(sums, sum, sizeof(sum));
}

// The rows first … last - 1 of W, at most kTableRows. p.x: one block of tokens.
template <int kVectors>
void block_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last) {
  using Sizes = Block<kVectors>;
  constexpr int kTokens = kVectors * kTokensInVector;
  alignas(64) char table[kTableBytes];
  alignas(64) Lanes sums[kTableRows * kVectors];
  Tile<kVectors> tile{};  // what it holds of rows after the last one is not used
  std::fill(std::begin(sums), std::end(sums), all(0));
  for (int64_t column = 0; column < p.in; column += Sizes::kColumns) {
    const int64_t columns = std::min<int64_t>(Sizes::kColumns, p.in - column);
    make_pairs<kVectors>(p.x + column * kTokens, columns / 4, table);
    for (int64_t row = first; row < last; row += kRows) {
      for (int64_t r = 0; r < std::min<int64_t>(kRows, last - row); ++r) {
        const int64_t at = (row + r) * p.in + column;
        const Bf16* const values = p.values + at / 2;
        const uint8_t* const positions = p.positions + at / 8;
        if (columns == Sizes::kColumns) {
          std::memcpy(tile.values[r], values, sizeof(tile.values[r]));
          std::memcpy(tile.positions[r], positions, sizeof(tile.positions[r]));
        } else {
          std::memcpy(tile.values[r], values, columns / 2 * sizeof(Bf16));
          std::memcpy(tile.positions[r], positions, columns / 8);
        }
        // the hardware prefetcher does not find the next columns; beyond the end this is harmless
        prefetch_block(values + Sizes::kColumns / 2, Sizes::kColumns / 2);
        prefetch_block(positions + Sizes::kColumns / 8, Sizes::kColumns / 8);
      }
      add_products<kVectors>(tile, columns / 4, table, sums + (row - first) * kVectors);
    }
  }
  const auto* const all_sums = reinterpret_cast<const float*>(sums);
  for (int64_t t = 0; t < p.tokens; ++t) {
    int64_t row = first;
    for (; row + kLanes <= last; row += kLanes) {
      finish_lanes(p, row, t, column_of<kTokens>(all_sums + (row - first) * kTokens + t));
    }
    for (; row < last; ++row) finish(p, row, t, all_sums[(row - first) * kTokens + t]);
  }
}

}  // namespace

void pair_tokens(const Bf16* x, int64_t stride, int64_t tokens, int64_t first, int64_t last,
                 PairStrides strides, Bf16* to) {
  constexpr int64_t kPairsTogether = 16;  // of columns: a cache line of each token is read once
  const int64_t vectors = (tokens + kTokensInVector - 1) / kTokensInVector;
  alignas(64) uint32_t lines[kTokensInVector][kPairsTogether];
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t token = v * kTokensInVector, count = std::min<int64_t>(kTokensInVector, tokens - token);
    std::memset(lines, 0, sizeof(lines));
    for (int64_t column = first; column < last; column += 2 * kPairsTogether) {
      const int64_t pairs = std::min(kPairsTogether, (last - column) / 2);
      for (int64_t t = 0; t < count; ++t) {
        std::memcpy(lines[t], x + (token + t) * stride + column, pairs * sizeof(uint32_t));
      }
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t at = (column + 2 * pair) / 4 * strides.group + v * strides.vector + pair % 2;
        auto* const lanes = reinterpret_cast<uint32_t*>(to) + at * kTokensInVector;
        for (int t = 0; t < kTokensInVector; ++t) lanes[t] = lines[t][pair];
      }
    }
  }
}

void sparse24_token_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last) {
  for (; first < last; first += kTableRows) {
    const int64_t stop = std::min(last, first + kTableRows);
    switch ((p.tokens + kTokensInVector - 1) / kTokensInVector) {
      case 1:
        block_rows<1>(p, first, stop);
        break;
      case 2:
        block_rows<2>(p, first, stop);
        break;
      case 3:
        block_rows<3>(p, first, stop);
        break;
      default:
        block_rows<4>(p, first, stop);
    }
  }
}

}  // namespace drot::DROT_SIMD

#endif
