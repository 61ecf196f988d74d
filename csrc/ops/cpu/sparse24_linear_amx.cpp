// sparse24_linear in bf16 for many tokens, on a CPU with the matrix instructions AMX: a tile register holds
// 16 rows of 64 bytes, and one instruction multiplies 16 rows of W in 32 columns by 16 tokens. A part of W is
// made dense in the L2 cache, then multiplied by all tokens: memory is read packed, the products are dense.
// It is compiled for such a CPU alone; sparse24_linear.cpp asks has_amx() first.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/cpu/sparse24_linear_bf16.h"
#include "ops/cpu/sparse24_linear_simd.h"

namespace drot::DROT_SIMD {
namespace {

// Rows of a tile register, and columns of a tile of W.
constexpr int kTileRows = 16, kTileColumns = kPaddingBf16;
static_assert(kTileRows == kVectorTokens24 && kTileRows == kLanes);
// Values of a tile of W, and sums of a tile.
constexpr int64_t kTileValues = kTileRows * kTileColumns, kTileSums = kTileRows * kTileRows;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The part of W that is made dense at a time; with the tokens in these columns and the sums it stays in the
// L2 cache. The tokens are read again for each such number of rows. The hardware prefetcher follows 32 rows,
// or more rows if it meets 1024 columns of each.
struct Part {
  int64_t rows, columns;
};
Part part_for(int64_t tokens) {
  if (tokens <= 32) return {32, 512};
  return tokens <= 128 ? Part{128, 1024} : Part{256, 512};
}

// All tile registers have 16 rows of 64 bytes: rows, columns and tokens are padded.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Makes `rows` rows of W dense in the columns of a part from `column` on. to: tiles [rows / 16, columns /
// 32]; what it holds of rows after the last one is not used.
void make_dense(const Sparse24Rows<Bf16, Bf16>& p, const Part& part, int64_t row, int64_t rows,
                int64_t column, Bf16* to) {
  constexpr int64_t kRead = 64;  // bytes of positions
  const int64_t bytes = std::min(part.columns, p.in - column) / 8;
  // the hardware prefetcher does not find the next columns; beyond the end this is harmless
  const int64_t next = ahead24(column + part.columns, p.in, static_cast<int>(rows)) - column;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row + r) * p.in + column;
    const Bf16* const values = p.values + at / 2;
    const uint8_t* const positions = p.positions + at / 8;
    Bf16* dense = to + r / kTileRows * kTileRows * part.columns + r % kTileRows * kTileColumns;
    prefetch_block<2>(values + next / 2, part.columns / 2);
    prefetch_block<2>(positions + next / 8, part.columns / 8);
    for (int64_t start = 0; start < bytes; start += kRead) {
      const int64_t count = std::min(kRead, bytes - start);
      const __mmask64 read = count < kRead ? (__mmask64{1} << count) - 1 : ~__mmask64{0};
      alignas(64) uint32_t columns[kRead / kExpandedBytes];
      _mm512_store_si512(columns, columns_of(_mm512_maskz_loadu_epi8(read, positions + start)));
      for (int64_t i = 0; i < count; i += kExpandedBytes, dense += kTileValues) {
        const int64_t now = std::min(kExpandedBytes, count - i);
        _mm512_store_si512(dense, expand(columns[i / kExpandedBytes], values + 4 * (start + i), now));
      }
    }
  }
}

// sums += W · x of kTiles tiles of rows and kVectors vectors of tokens, over `steps` times 32 columns.
// `w_stride` and `x_stride`: values between two tiles of rows and between two vectors of tokens;
// `sums_stride`: sums between two tiles of rows.
template <int kTiles, int kVectors>
void multiply(const Bf16* w, int64_t w_stride, const Bf16* x, int64_t x_stride, int64_t steps, float* sums,
              int64_t sums_stride) {
  static_assert(kTiles <= 2 && kVectors <= 2);
  _tile_loadd(0, sums, 64);
  if constexpr (kVectors == 2) _tile_loadd(1, sums + kTileSums, 64);
  if constexpr (kTiles == 2) _tile_loadd(2, sums + sums_stride, 64);
  if constexpr (kTiles == 2 && kVectors == 2) _tile_loadd(3, sums + sums_stride + kTileSums, 64);
  for (int64_t i = 0; i < steps; ++i, w += kTileValues, x += kTileValues) {
    // all loads first: so those of the next step overlap with these products
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    if constexpr (kTiles == 2) _tile_loadd(5, w + w_stride, 64);
    if constexpr (kVectors == 2) _tile_loadd(7, x + x_stride, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kVectors == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTiles == 2 && kVectors == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  if constexpr (kVectors == 2) _tile_stored(1, sums + kTileSums, 64);
  if constexpr (kTiles == 2) _tile_stored(2, sums + sums_stride, 64);
  if constexpr (kTiles == 2 && kVectors == 2) _tile_stored(3, sums + sums_stride + kTileSums, 64);
}

}  // namespace

int64_t scratch_bytes(int64_t tokens) {
  const Part part = part_for(tokens);
  const int64_t padded = divide_up(tokens, kVectorTokens24) * kVectorTokens24;
  return 64 + part.rows * (part.columns * sizeof(Bf16) + padded * sizeof(float));
}

void sparse24_token_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last, char* scratch) {
  const Part part = part_for(p.tokens);
  const int64_t vectors = divide_up(p.tokens, kVectorTokens24);
  const int64_t w_stride = kTileRows * part.columns, x_stride = padded_bf16(p.in) * kVectorTokens24;
  const int64_t sums_stride = vectors * kTileSums;
  scratch += -reinterpret_cast<uintptr_t>(scratch) % 64;
  auto* const dense = reinterpret_cast<Bf16*>(scratch);
  auto* const sums = reinterpret_cast<float*>(dense + part.rows * part.columns);
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t row = first; row < last; row += part.rows) {
    const int64_t rows = std::min(part.rows, last - row), tiles = divide_up(rows, kTileRows);
    std::memset(sums, 0, tiles * sums_stride * sizeof(float));
    for (int64_t column = 0; column < p.in; column += part.columns) {
      make_dense(p, part, row, rows, column, dense);
      asm volatile("" ::: "memory");  // GCC does not know that the loads of tiles read memory
      const int64_t steps = divide_up(std::min(part.columns, p.in - column), kTileColumns);
      for (int64_t v = 0; v < vectors; v += 2) {
        const Bf16* const x = p.x + v * x_stride + column * kVectorTokens24;
        for (int64_t t = 0; t < tiles; t += 2) {
          const auto call = v + 1 < vectors ? (t + 1 < tiles ? multiply<2, 2> : multiply<1, 2>)
                                            : (t + 1 < tiles ? multiply<2, 1> : multiply<1, 1>);
          call(dense + t * w_stride, w_stride, x, x_stride, steps, sums + t * sums_stride + v * kTileSums,
               sums_stride);
        }
      }
    }
    for (int64_t token = 0; token < p.tokens; ++token) {
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const float* const of_tile = sums + r / kTileRows * sums_stride +
                                     token / kVectorTokens24 * kTileSums + token % kVectorTokens24;
        if (r + kTileRows <= rows) {
          finish_lanes(p, row + r, token, column_of<kTileRows>(of_tile));
          continue;
        }
        for (int64_t i = r; i < rows; ++i) finish(p, row + i, token, of_tile[(i - r) * kTileRows]);
      }
    }
  }
  _tile_release();
}

}  // namespace drot::DROT_SIMD

#endif
