// Parallel work on chunks of rows, and sums over the chunks in their order, which do not depend on the number
// of threads. Used by the CPU kernels of entropy_loss and pruned_importance.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace drot {

// The chunks of a matrix depend on its number of rows alone. kMaxChunks bounds the memory of their partial
// sums.
class RowChunks {
 public:
  explicit RowChunks(int64_t rows) : rows_(rows), size_(std::max(kMinRows, divide_up(rows, kMaxChunks))) {}

  int64_t count() const { return divide_up(rows_, size_); }

  // Calls f(chunk, first row, row after the last) in parallel. An idle thread takes the next chunk, so that a
  // slow thread does not delay the others.
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

// out[j] = Σ over chunks of partial[chunk][j], accumulated in fp64.
template <class In, class Out>
void sum_chunks(const std::vector<In>& partial, int64_t columns, Out* out) {
  const int64_t chunks = columns == 0 ? 0 : static_cast<int64_t>(partial.size()) / columns;
  // a million additions a thread pay for waking it
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
