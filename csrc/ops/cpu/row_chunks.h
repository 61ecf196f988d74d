// Work on a matrix in chunks of rows, whose results are added up in order of the chunks: the same
// sums whatever the number of threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace drot {

constexpr int64_t kChunkRows = 32;

inline int64_t chunks_of(int64_t rows) { return (rows + kChunkRows - 1) / kChunkRows; }

// f(chunk, first row, last row), in parallel.
template <class F>
void for_each_chunk(int64_t rows, const F& f) {
  at::parallel_for(0, chunks_of(rows), 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      f(k, k * kChunkRows, std::min((k + 1) * kChunkRows, rows));
    }
  });
}

// out[j] = Σ over chunks of partial[chunk][j], added in double.
template <class In, class Out>
void sum_chunks(const std::vector<In>& partial, int64_t chunks, int64_t columns, Out* out) {
  at::parallel_for(0, columns, 256, [&](int64_t first, int64_t last) {
    constexpr int64_t kTile = 256;
    double sum[kTile];
    for (int64_t start = first; start < last; start += kTile) {
      const int64_t width = std::min(kTile, last - start);
      std::fill(sum, sum + width, 0.0);
      for (int64_t k = 0; k < chunks; ++k) {
        const In* p = partial.data() + k * columns + start;
        for (int64_t j = 0; j < width; ++j) sum[j] += p[j];
      }
      for (int64_t j = 0; j < width; ++j) out[start + j] = static_cast<Out>(sum[j]);
    }
  });
}

}  // namespace drot
