// sparse24_linear in bf16 for many tokens, on a CPU with the matrix instructions AMX: a tile register holds
// 16 rows of 64 bytes, and one instruction multiplies 16 rows of W in 32 columns by 16 tokens. A part of W is
// made dense in the L2 cache, then multiplied by all tokens: memory is read packed, the products are dense.
// It is compiled for such a CPU alone; sparse24_linear.cpp asks amx::permitted() first.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
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
// Columns that are made dense at a time: 64 bytes of positions.
constexpr int64_t kColumns = 512;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that are made dense at a time. For few tokens they stay in the L1 cache; for many, the tokens are read
// again for each such number of rows.
int64_t dense_rows(int64_t tokens) { return tokens <= 64 ? 32 : 256; }

// All tile registers have 16 rows of 64 bytes: rows, columns and tokens are padded.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Makes `rows` rows of W dense in `columns` columns from `column` on. to: tiles in the order [rows / 16]
// [kColumns / 32]; rows and columns after the last ones of W are zeros or what was there.
void make_dense(const Sparse24Rows<Bf16, Bf16>& p, int64_t row, int64_t rows, int64_t column, Bf16* to) {
  const int64_t bytes = std::min(kColumns, p.in - column) / 8;
  const __mmask64 read = bytes < 64 ? (__mmask64{1} << bytes) - 1 : ~__mmask64{0};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row + r) * p.in + column;
    const Bf16* const values = p.values + at / 2;
    alignas(64) uint32_t columns[kColumns / kTileColumns];
    _mm512_store_si512(columns, columns_of(_mm512_maskz_loadu_epi8(read, p.positions + at / 8)));
    Bf16* const dense = to + r / kTileRows * kTileRows * kColumns + r % kTileRows * kTileColumns;
    // the hardware prefetcher does not find the next columns; beyond the end this is harmless
    const int64_t next = ahead24(column + kColumns, p.in, static_cast<int>(rows)) - column;
    prefetch_block<2>(values + next / 2, kColumns / 2);
    prefetch_block<2>(p.positions + at / 8 + next / 8, kColumns / 8);
    for (int64_t i = 0; i < bytes; i += kExpandedBytes) {
      const int64_t tile = i / kExpandedBytes;
      _mm512_store_si512(dense + tile * kTileValues,
                         expand(columns[tile], values + 4 * i, std::min(kExpandedBytes, bytes - i)));
    }
  }
}

// sums += W · x of kTiles tiles of rows and kVectors vectors of tokens, over `steps` times 32 columns.
// `x_stride`: values between two vectors of tokens; `sums_stride`: sums between two tiles of rows.
template <int kTiles, int kVectors>
void multiply(const Bf16* w, const Bf16* x, int64_t x_stride, int64_t steps, float* sums,
              int64_t sums_stride) {
  static_assert(kTiles <= 2 && kVectors <= 2);
  _tile_loadd(0, sums, 64);
  if constexpr (kVectors == 2) _tile_loadd(1, sums + kTileSums, 64);
  if constexpr (kTiles == 2) _tile_loadd(2, sums + sums_stride, 64);
  if constexpr (kTiles == 2 && kVectors == 2) _tile_loadd(3, sums + sums_stride + kTileSums, 64);
  for (int64_t i = 0; i < steps; ++i, w += kTileValues, x += kTileValues) {
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTiles == 2) {
      _tile_loadd(5, w + kTileRows * kColumns, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kVectors == 2) {
      _tile_loadd(7, x + x_stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTiles == 2 && kVectors == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  if constexpr (kVectors == 2) _tile_stored(1, sums + kTileSums, 64);
  if constexpr (kTiles == 2) _tile_stored(2, sums + sums_stride, 64);
  if constexpr (kTiles == 2 && kVectors == 2) _tile_stored(3, sums + sums_stride + kTileSums, 64);
}

}  // namespace

bool permitted() {
#if defined(__linux__)
  // the operating system gives a process the 8 KiB of tile registers when it asks for them
  static const bool given = [] {
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const char* const limit = std::getenv("DROT_SIMD");
    unsigned a = 0, b = 0, c = 0, d = 0;
    return !(limit && std::strcmp(limit, "avx512") == 0) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & kBf16) && (d & kTiles) && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return given;
#else
  return false;
#endif
}

int64_t scratch_bytes(int64_t tokens) {
  const int64_t vectors = divide_up(tokens, kVectorTokens24);
  return 64 + dense_rows(tokens) * (kColumns * sizeof(Bf16) + vectors * kVectorTokens24 * sizeof(float));
}

void sparse24_token_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last, char* scratch) {
  const int64_t vectors = divide_up(p.tokens, kVectorTokens24), most = dense_rows(p.tokens);
  const int64_t padded = padded_bf16(p.in), x_stride = padded * kVectorTokens24;
  scratch += -reinterpret_cast<uintptr_t>(scratch) % 64;
  Bf16* const dense = reinterpret_cast<Bf16*>(scratch);
  float* const sums = reinterpret_cast<float*>(dense + most * kColumns);
  const TileConfig config;
  _tile_loadconfig(&config);
  std::memset(dense, 0, most * kColumns * sizeof(Bf16));
  for (int64_t row = first; row < last; row += most) {
    const int64_t rows = std::min(most, last - row), tiles = divide_up(rows, kTileRows);
    const int64_t stride = vectors * kTileSums;  // of a tile of rows in the sums
    std::memset(sums, 0, tiles * stride * sizeof(float));
    for (int64_t column = 0; column < p.in; column += kColumns) {
      make_dense(p, row, rows, column, dense);
      // GCC does not know that the loads of tiles read memory
      asm volatile("" ::: "memory");
      const int64_t steps = divide_up(std::min(kColumns, p.in - column), kTileColumns);
      for (int64_t v = 0; v < vectors; v += 2) {
        const Bf16* const x = p.x + v * x_stride + column * kVectorTokens24;
        for (int64_t t = 0; t < tiles; t += 2) {
          const Bf16* const w = dense + t * kTileRows * kColumns;
          float* const to = sums + t * stride + v * kTileSums;
          const auto call = v + 1 < vectors ? (t + 1 < tiles ? multiply<2, 2> : multiply<1, 2>)
                                            : (t + 1 < tiles ? multiply<2, 1> : multiply<1, 1>);
          call(w, x, x_stride, steps, to, stride);
        }
      }
    }
    for (int64_t token = 0; token < p.tokens; ++token) {
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const float* const of_tile =
            sums + r / kTileRows * stride + token / kVectorTokens24 * kTileSums + token % kVectorTokens24;
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
