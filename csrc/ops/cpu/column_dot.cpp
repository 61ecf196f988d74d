#include "ops/column_dot.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

namespace drot {
namespace {

constexpr int64_t kTile = 64;  // columns of a task: few cache lines of each row

at::Tensor column_dot_cpu(const at::Tensor& a, const at::Tensor& b) {
  check_column_dot(a, b);
  const at::Tensor left = a.contiguous(), right = b.contiguous();
  const int64_t count = a.size(0), rows = a.size(1), columns = a.size(2);
  at::Tensor out = at::zeros({count, columns}, left.options());
  const float* x = left.const_data_ptr<float>();
  const float* y = right.const_data_ptr<float>();
  float* sums = out.mutable_data_ptr<float>();
  const int64_t tiles = (columns + kTile - 1) / kTile;
  at::parallel_for(0, count * tiles, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const int64_t matrix = k / tiles, start = k % tiles * kTile, end = std::min(start + kTile, columns);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = (matrix * rows + i) * columns;
        for (int64_t j = start; j < end; ++j) sums[matrix * columns + j] += x[row + j] * y[row + j];
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("column_dot", &column_dot_cpu); }

}  // namespace drot
