#include "ops/cpu/sparse24_linear_simd.h"

#include "ops/cpu/sparse24_linear_lanes.h"

namespace drot::DROT_SIMD {
namespace {

// Rows of W and tokens that are multiplied together in registers: twelve sums and seven other registers.
constexpr int kRows = 4, kTokens = 3;
// For more tokens, kTileRows rows of W are made dense, kTileColumns at a time. This tile and the columns of x
// of kTileTokens tokens stay in the L2 cache, kRows rows of the tile in the L1 cache.
constexpr int kTileRows = kRows24, kTileColumns = 1024, kTileTokens = 48;

// Columns of a row that are prefetched together, and the values of a row from here to there. The hardware
// prefetcher alone leaves half of the memory's rate.
constexpr int64_t kPrefetched = 128, kAhead = 1024;

// Rows of W in the packed form: a source of vectors of W for add_products.
template <class V>
struct Packed {
  const V* values;
  const uint8_t* positions;
  int64_t in;
  DROT_HOST_DEVICE Lanes at(int row, int64_t column) const {
    return expand(values + (row * in + column) / 2, positions + (row * in + column) / 8);
  }
  DROT_HOST_DEVICE Lanes half_at(int row, int64_t column) const {
    return expand_half(values + (row * in + column) / 2, positions + (row * in + column) / 8);
  }
  DROT_HOST_DEVICE void prefetch(int row, int64_t column, int rows) const {
    const int64_t ahead = ahead24(column / 2 + kAhead, in / 2, rows);
    prefetch_block(values + row * in / 2 + ahead, kPrefetched / 2);
    prefetch_block(positions + (row * in / 2 + ahead) / 4, kPrefetched / 8);
  }
};

// Rows of W that are dense in a tile: another source for add_products.
struct Dense {
  const float* rows;
  DROT_HOST_DEVICE Lanes at(int row, int64_t column) const {
    return load(rows + row * kTileColumns + column);
  }
  DROT_HOST_DEVICE Lanes half_at(int row, int64_t column) const { return at(row, column); }
  DROT_HOST_DEVICE void prefetch(int, int64_t, int) const {}  // it is in the cache
};

// Dense rows in memory: another source for add_products. The last vector is padded with zeros.
template <class V>
struct Plain {
  const V* rows;
  int64_t in;
  DROT_HOST_DEVICE Lanes at(int row, int64_t column) const { return load(rows + row * in + column); }
  DROT_HOST_DEVICE Lanes half_at(int row, int64_t column) const {
    V last[kLanes] = {};
    std::memcpy(last, rows + row * in + column, (in - column) * sizeof(V));
    return load(last);
  }
  DROT_HOST_DEVICE void prefetch(int row, int64_t column, int together) const {
    prefetch_block(rows + row * in + ahead24(column + kAhead, in, together), kPrefetched);
  }
};

template <int kRowsNow, int kTokensNow>
using Sums = Lanes[kRowsNow][kTokensNow];

// sum[r][t] += w[r] · x[t] in each lane, over all columns.
template <int kRowsNow, int kTokensNow, class W>
DROT_HOST_DEVICE void add_products(const W& w, const float* x, int64_t stride, int64_t columns,
                                   Sums<kRowsNow, kTokensNow>& sum) {
  // all vectors of the fewer of rows and tokens are loaded first, the others one at a time: so the sums and
  // these vectors fit in the registers
  const auto step = [&](int64_t column, const auto& at) {
    if constexpr (kRowsNow < kTokensNow) {
      Lanes ws[kRowsNow];
      for (int r = 0; r < kRowsNow; ++r) ws[r] = at(r);
      for (int t = 0; t < kTokensNow; ++t) {
        const Lanes xs = load(x + t * stride + column);
        for (int r = 0; r < kRowsNow; ++r) sum[r][t] = add_product(ws[r], xs, sum[r][t]);
      }
    } else {
      Lanes xs[kTokensNow];
      for (int t = 0; t < kTokensNow; ++t) xs[t] = load(x + t * stride + column);
      for (int r = 0; r < kRowsNow; ++r) {
        const Lanes ws = at(r);
        for (int t = 0; t < kTokensNow; ++t) sum[r][t] = add_product(ws, xs[t], sum[r][t]);
      }
    }
  };
  int64_t column = 0;
  while (column + kLanes <= columns) {
    for (int r = 0; r < kRowsNow; ++r) w.prefetch(r, column, kRowsNow);
    const int64_t stop = columns - column < kPrefetched ? columns : column + kPrefetched;
    for (; column + kLanes <= stop; column += kLanes) step(column, [&](int r) { return w.at(r, column); });
  }
  if (column < columns) step(column, [&](int r) { return w.half_at(r, column); });
}

// Calls done(r, t, w[r] · x[t]) for all rows and tokens.
template <int kRowsNow, int kTokensNow, class W, class F>
DROT_HOST_DEVICE void products(const W& w, const float* x, int64_t stride, int64_t columns, const F& done) {
  Sums<kRowsNow, kTokensNow> sum;
  for (auto& of_row : sum) {
    for (auto& lanes : of_row) lanes = all(0);
  }
  add_products<kRowsNow, kTokensNow>(w, x, stride, columns, sum);
  for (int r = 0; r < kRowsNow; ++r) {
    for (int t = 0; t < kTokensNow; ++t) done(r, t, sum_of(sum[r][t]));
  }
}

// For few tokens: W is expanded from memory into registers.
template <int kRowsNow, int kTokensNow, class V>
void direct(const Sparse24Rows<V>& p, int64_t row) {
  const Packed<V> w{p.values + row * p.in / 2, p.positions + row * p.in / 8, p.in};
  products<kRowsNow, kTokensNow>(w, p.x, padded24(p.in), p.in,
                                 [&](int r, int t, float sum) { finish(p, row + r, t, sum); });
}

template <int kRowsNow, int kTokensNow, class V>
void direct_rows(const Sparse24Rows<V>& p, int64_t first, int64_t last) {
  for (; first + kRowsNow <= last; first += kRowsNow) direct<kRowsNow, kTokensNow>(p, first);
  for (; first < last; ++first) direct<1, kTokensNow>(p, first);
}

template <int kTokensNow>
DROT_HOST_DEVICE void tile_products(const float* tile, const float* x, int64_t stride, int64_t columns,
                                    Lanes* sums) {
  Sums<kRows, kTokensNow> sum;
  std::memcpy(sum, sums, sizeof(sum));
  add_products<kRows, kTokensNow>(Dense{tile}, x, stride, columns, sum);
  std::memcpy(sums, sum, sizeof(sum));
}

// The number n of tokens that tile_products multiplies together from `token` on. Their sums are [kRows][n].
DROT_HOST_DEVICE int64_t together_at(int64_t token, int64_t tokens) {
  return tokens - token < kTokens ? tokens - token : kTokens;
}

template <int kRowsNow, int kTokensNow, class V>
void rotated(const RotatedColumns<V>& p, int64_t column, int64_t token) {
  products<kRowsNow, kTokensNow>(Plain<V>{p.columns + column * p.n, p.n}, p.x + token * padded24(p.n),
                                 padded24(p.n), p.n,
                                 [&](int r, int t, float sum) { p.y[(token + t) * p.n + column + r] = sum; });
}

template <int kRowsNow, class V>
void rotated_tokens(const RotatedColumns<V>& p, int64_t column) {
  for (int64_t t = 0; t < p.tokens; t += kTokens) {
    switch (together_at(t, p.tokens)) {
      case 1:
        rotated<kRowsNow, 1>(p, column, t);
        break;
      case 2:
        rotated<kRowsNow, 2>(p, column, t);
        break;
      default:
        rotated<kRowsNow, kTokens>(p, column, t);
    }
  }
}

// For more tokens, at most kTileTokens: each tile of W is made dense once.
template <class V>
void tiled_rows(const Sparse24Rows<V>& p, int64_t row, int rows, int64_t token, int64_t tokens) {
  alignas(64) float tile[kTileRows * kTileColumns];
  alignas(64) Lanes sums[kTileRows / kRows][kRows * kTileTokens];
  const int64_t stride = padded24(p.in);
  for (auto& of_rows : sums) {
    for (auto& lanes : of_rows) lanes = all(0);
  }
  std::memset(tile, 0, sizeof(tile));  // rows after the last one are zeros
  for (int64_t column = 0; column < p.in; column += kTileColumns) {
    const int64_t columns = p.in - column < kTileColumns ? p.in - column : kTileColumns;
    for (int r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * p.in + column;
      float* const dense = tile + r * kTileColumns;
      // the hardware prefetcher does not find the next tile
      prefetch_block(p.values + (at + kTileColumns) / 2, kTileColumns / 2);
      prefetch_block(p.positions + (at + kTileColumns) / 8, kTileColumns / 8);
      expand_bytes(p.values + at / 2, p.positions + at / 8, columns / 8, dense);
      // the other half of the last vector may hold NaN from before
      std::memset(dense + columns, 0, (padded24(columns) - columns) * sizeof(float));
    }
    for (int r = 0; r < rows; r += kRows) {
      const float* const dense = tile + r * kTileColumns;
      for (int64_t t = 0; t < tokens; t += kTokens) {
        const float* const x = p.x + (token + t) * stride + column;
        Lanes* const of_tokens = sums[r / kRows] + t * kRows;
        switch (together_at(t, tokens)) {
          case 1:
            tile_products<1>(dense, x, stride, columns, of_tokens);
            break;
          case 2:
            tile_products<2>(dense, x, stride, columns, of_tokens);
            break;
          default:
            tile_products<kTokens>(dense, x, stride, columns, of_tokens);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t first = t / kTokens * kTokens;
      const Lanes* const of_tokens = sums[r / kRows] + first * kRows;
      const int64_t at = r % kRows * together_at(first, tokens) + t - first;
      finish(p, row + r, token + t, sum_of(of_tokens[at]));
    }
  }
}

}  // namespace

template <class V>
void sparse24_rows(const Sparse24Rows<V>& p, int64_t first, int64_t last) {
  switch (p.tokens) {
    case 1:
      return direct_rows<4, 1>(p, first, last);
    case 2:
      return direct_rows<4, 2>(p, first, last);
    case 3:
      return direct_rows<4, 3>(p, first, last);
    case 4:
      return direct_rows<2, 4>(p, first, last);
    case 5:
      return direct_rows<2, 5>(p, first, last);
    case 6:
      return direct_rows<2, 6>(p, first, last);
  }
  for (; first < last; first += kTileRows) {
    const int rows = static_cast<int>(last - first < kTileRows ? last - first : kTileRows);
    for (int64_t token = 0; token < p.tokens; token += kTileTokens) {
      const int64_t tokens = p.tokens - token < kTileTokens ? p.tokens - token : kTileTokens;
      tiled_rows(p, first, rows, token, tokens);
    }
  }
}

template <class V>
void rotate_columns(const RotatedColumns<V>& p, int64_t first, int64_t last) {
  for (; first + kRows <= last; first += kRows) rotated_tokens<kRows>(p, first);
  for (; first < last; ++first) rotated_tokens<1>(p, first);
}

template <class V>
void widen_rows(const V* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  const int64_t padded = padded24(columns);
  for (int64_t i = 0; i < rows; ++i) {
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) store(load(from + i * stride + j), to + i * padded + j);
    for (; j < padded; ++j) to[i * padded + j] = j < columns ? widen(from[i * stride + j]) : 0;
  }
}

template <class V>
void expand_bytes(const V* values, const uint8_t* positions, int64_t bytes, float* to) {
  constexpr int64_t kBytes = kLanes / 8;
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) store(expand(values + 4 * i, positions + i), to + 8 * i);
  if (i < bytes) {
    float last[kLanes];
    store(expand_half(values + 4 * i, positions + i), last);
    std::memcpy(to + 8 * i, last, 8 * sizeof(float));
  }
}

#define DROT_INSTANTIATE(V)                                                 \
  template void sparse24_rows(const Sparse24Rows<V>&, int64_t, int64_t);    \
  template void rotate_columns(const RotatedColumns<V>&, int64_t, int64_t); \
  template void widen_rows(const V*, int64_t, int64_t, int64_t, float*);    \
  template void expand_bytes(const V*, const uint8_t*, int64_t, float*);
DROT_INSTANTIATE(Bf16)
DROT_INSTANTIATE(Fp16)
DROT_INSTANTIATE(float)

}  // namespace drot::DROT_SIMD
