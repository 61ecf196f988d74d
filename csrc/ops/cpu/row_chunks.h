// Work on a matrix in chunks of rows, whose results are added up in order of the chunks: the same
// sums whatever the number of threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace drot {

// The chunks of a matrix depend on its rows alone. At most kMaxChunks keep what is added up small.
class RowChunks {
 public:
  explicit RowChunks(int64_t rows) : rows_(rows), size_(std::max(kMinRows, divide_up(rows, kMaxChunks))) {}

  int64_t count() const { return divide_up(rows_, size_); }

  // f(chunk, first row, last row), in parallel; a thread that is free takes the next chunk, so that
  // one that other work slows down does not hold up the rest.
  template <class F>
  void for_each(const F& f) const {
    std::atomic<int64_t> next{0};
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), count());
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t k = next++; k < count(); k = next++) f(k, k * size_, std::min((k + 1) * size_, rows_));
    });
  }

 private:
  static constexpr int64_t kMinRows = 32, kMaxChunks = 64;
  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t rows_, size_;
};

// out[j] = Σ over chunks of partial[chunk][j], added in double.
template <class In, class Out>
void sum_chunks(const std::vector<In>& partial, int64_t columns, Out* out) {
  const int64_t chunks = columns == 0 ? 0 : static_cast<int64_t>(partial.size()) / columns;
  // threads are worth waking for a million additions each
  const int64_t grain = (int64_t(1) << 20) / std::max<int64_t>(chunks, 1);
  at::parallel_for(0, columns, grain, [&](int64_t first, int64_t last) {
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
