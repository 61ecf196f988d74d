#include "ops/entropy_loss.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <numeric>
#include <tuple>
#include <vector>

#include "common/cpu/results.h"
#include "common/cpu/row_chunks.h"
#include "ops/cpu/entropy_loss_simd.h"

namespace drot {
namespace {

// The arguments and results of one call, contiguous.
template <class T>
struct Problem {
  using Math = Wide<T>;
  const T* y;
  const Math* column_scale;  // or null, for 1
  int64_t rows, columns;
  double scale;
  T* dy;
  Math* dcolumn_scale;  // null where column_scale is
  bool stream;
};

void check_finite(const EntropySums<double>& sums, const char* name, int64_t index) {
  // T overflows for slightly smaller scores than Z
  TORCH_CHECK_VALUE(std::isfinite(sums.z) && std::isfinite(sums.t),
                    "y² · column_scale must be finite, with finite sums, but ", name, " ", index, " sums to ",
                    sums.z);
}

// The loss of the rows, not yet scaled. y is read from memory once: a row is still in the cache when its sums
// are complete.
template <class T>
double entropy_of_rows(const Problem<T>& p) {
  using Math = Wide<T>;
  const RowChunks chunks(p.rows);
  const int64_t n = p.columns;
  std::vector<double> loss(p.rows);
  std::vector<Math> partial_scale(p.dcolumn_scale ? chunks.count() * n : 0);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    std::vector<Math> logs(n);
    for (int64_t i = first; i < last; ++i) {
      const T* next = i + 1 < last ? p.y + (i + 1) * n : nullptr;
      const auto [sums, all_count] =
          DROT_SIMD_CALL(entropy_row_sums)(p.y + i * n, p.column_scale, n, logs.data(), next);
      check_finite(sums, "row", i);
      loss[i] = entropy_of(sums);
      DROT_SIMD_CALL(entropy_row_gradient)
      (EntropyRow<T>{p.y + i * n, p.column_scale, n, entropy_group<Math>(sums, p.scale), nullptr, nullptr,
                     logs.data(), all_count, p.dy + i * n,
                     p.dcolumn_scale ? partial_scale.data() + k * n : nullptr, p.stream});
    }
  });
  if (p.dcolumn_scale) sum_chunks(partial_scale, n, p.dcolumn_scale);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

// The loss of the columns, and of the rows where by_row, not yet scaled. One pass over y computes the sums, a
// second one the gradient.
template <class T>
double entropy_of_columns(const Problem<T>& p, bool by_row) {
  using Math = Wide<T>;
  const RowChunks chunks(p.rows);
  const int64_t n = p.columns;
  std::vector<EntropyGroup<Math>> row_group(p.rows);
  std::vector<double> loss(p.rows + n);
  std::vector<Math> partial_z(chunks.count() * n), partial_t(chunks.count() * n);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto sums = DROT_SIMD_CALL(entropy_add_row)(p.y + i * n, p.column_scale, n,
                                                        partial_z.data() + k * n, partial_t.data() + k * n);
      if (!by_row) continue;
      check_finite(sums, "row", i);
      loss[i] = entropy_of(sums);
      row_group[i] = entropy_group<Math>(sums, p.scale);
    }
  });

  std::vector<double> z(n), t(n);
  sum_chunks(partial_z, n, z.data());
  sum_chunks(partial_t, n, t.data());
  std::vector<Math> mean_log(n), weight(n);
  for (int64_t j = 0; j < n; ++j) {
    const EntropySums<double> sums{z[j], t[j]};
    check_finite(sums, "column", j);
    const auto group = entropy_group<Math>(sums, p.scale);
    loss[p.rows + j] = entropy_of(sums);
    mean_log[j] = group.mean_log;
    weight[j] = group.weight;
  }

  std::vector<Math> partial_scale(p.dcolumn_scale ? chunks.count() * n : 0);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      DROT_SIMD_CALL(entropy_row_gradient)
      (EntropyRow<T>{p.y + i * n, p.column_scale, n, row_group[i], mean_log.data(), weight.data(), nullptr,
                     false, p.dy + i * n, p.dcolumn_scale ? partial_scale.data() + k * n : nullptr,
                     p.stream});
    }
  });
  if (p.dcolumn_scale) sum_chunks(partial_scale, n, p.dcolumn_scale);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> entropy_loss_cpu(const at::Tensor& y,
                                                                const std::optional<at::Tensor>& column_scale,
                                                                bool rows, bool columns, double scale) {
  check_entropy_loss(y, column_scale, rows, columns, scale);
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous();
  const at::Tensor factors = column_scale ? column_scale->contiguous() : at::empty({0}, wide);
  TORCH_CHECK_VALUE(!factors.lt(0).any().item<bool>(), "column_scale must not be negative, got a minimum of ",
                    factors.min().item<double>());
  at::Tensor dy = empty_result(in);
  at::Tensor dcolumn_scale = at::zeros({column_scale ? y.size(1) : 0}, wide);
  double loss = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "entropy_loss", [&] {
    using T = Stored<scalar_t>;
    const Problem<T> p{static_cast<const T*>(in.const_data_ptr()),
                       column_scale ? factors.const_data_ptr<Wide<T>>() : nullptr,
                       y.size(0),
                       y.size(1),
                       scale,
                       static_cast<T*>(dy.mutable_data_ptr()),
                       column_scale ? dcolumn_scale.mutable_data_ptr<Wide<T>>() : nullptr,
                       streams(dy)};
    loss = columns ? entropy_of_columns(p, rows) : entropy_of_rows(p);
  });
  return {at::scalar_tensor(scale * loss, wide), dy, dcolumn_scale};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("entropy_loss", &entropy_loss_cpu); }

}  // namespace drot
