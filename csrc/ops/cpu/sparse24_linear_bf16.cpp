// sparse24_linear in bf16 for few tokens, on a CPU with the instructions of AVX-512 VBMI2 (vpexpandw: the
// columns of packed values) and AVX-512 BF16 (vdpbf16ps: 32 products at a time, added in fp32). It is
// compiled for such a CPU alone; sparse24_linear.cpp asks has_bf16_products() before each call.
#if defined(__x86_64__)

#include "ops/cpu/sparse24_linear_bf16.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/cpu/sparse24_linear_simd.h"

namespace drot::DROT_SIMD {
namespace {

// Rows of W that are multiplied together: with the most tokens, 24 sums, four vectors of W and one of x.
constexpr int kRows = 4;
// Bytes of positions that are read together.
constexpr int64_t kBytes = 64;
// Values of a row that are prefetched ahead. The hardware prefetcher alone leaves half of the memory's rate.
constexpr int64_t kAhead = 1024;

// y for kRowsNow rows of W from `row` on, and all tokens.
template <int kRowsNow, int kTokens>
void products(const Sparse24Rows<Bf16, Bf16>& p, int64_t row) {
  const Bf16 *const values = p.values + row * p.in / 2, *x = p.x;
  const uint8_t* const positions = p.positions + row * p.in / 8;
  Lanes sum[kRowsNow][kTokens];
  for (auto& of_row : sum) std::fill_n(of_row, kTokens, all(0));
  for (int64_t start = 0; start < p.in / 8; start += kBytes) {
    const int64_t count = std::min<int64_t>(kBytes, p.in / 8 - start);
    const __mmask64 read = count < kBytes ? (__mmask64{1} << count) - 1 : ~__mmask64{0};
    alignas(64) uint32_t columns[kRowsNow][kBytes / kExpandedBytes];
    for (int r = 0; r < kRowsNow; ++r) {
      const uint8_t* const bytes = positions + r * p.in / 8 + start;
      _mm512_store_si512(columns[r], columns_of(_mm512_maskz_loadu_epi8(read, bytes)));
      const int64_t ahead = ahead24(start + kAhead / 4, p.in / 8, kRowsNow);
      prefetch_block(values + r * p.in / 2 + 4 * ahead, 4 * kBytes);
      prefetch_block(positions + r * p.in / 8 + ahead, kBytes);
    }
    for (int64_t i = 0; i < count; i += kExpandedBytes, x += kTokens * kPaddingBf16) {
      __m512bh w[kRowsNow];
      for (int r = 0; r < kRowsNow; ++r) {
        const Bf16* const packed = values + r * p.in / 2 + 4 * (start + i);
        w[r] = as_bf16(
            expand(columns[r][i / kExpandedBytes], packed, std::min<int64_t>(kExpandedBytes, count - i)));
      }
      for (int t = 0; t < kTokens; ++t) {
        const __m512bh xs = as_bf16(_mm512_loadu_si512(x + t * kPaddingBf16));
        for (int r = 0; r < kRowsNow; ++r) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], w[r], xs);
      }
    }
  }
  for (int r = 0; r < kRowsNow; ++r) {
    for (int t = 0; t < kTokens; ++t) finish(p, row + r, t, sum_of(sum[r][t]));
  }
}

template <int kTokens>
void rows_of(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last) {
  for (; first + kRows <= last; first += kRows) products<kRows, kTokens>(p, first);
  for (; first < last; ++first) products<1, kTokens>(p, first);
}

}  // namespace

void group_tokens(const Bf16* x, int64_t stride, int64_t tokens, int64_t in, Bf16* to) {
  for (int64_t column = 0; column < in; column += kPaddingBf16) {
    const auto read =
        static_cast<__mmask32>((uint64_t{1} << std::min<int64_t>(kPaddingBf16, in - column)) - 1);
    for (int64_t t = 0; t < tokens; ++t, to += kPaddingBf16) {
      _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(read, x + t * stride + column));
    }
  }
}

void sparse24_rows(const Sparse24Rows<Bf16, Bf16>& p, int64_t first, int64_t last) {
  switch (p.tokens) {
    case 1:
      return rows_of<1>(p, first, last);
    case 2:
      return rows_of<2>(p, first, last);
    case 3:
      return rows_of<3>(p, first, last);
    case 4:
      return rows_of<4>(p, first, last);
    case 5:
      return rows_of<5>(p, first, last);
    default:
      return rows_of<kTogether24>(p, first, last);
  }
}

}  // namespace drot::DROT_SIMD

#endif
