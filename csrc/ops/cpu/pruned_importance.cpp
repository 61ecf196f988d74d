#include "ops/pruned_importance.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/cpu/results.h"
#include "common/cpu/row_chunks.h"
#include "ops/cpu/pruned_importance_simd.h"

namespace drot {
namespace {

// Raises the error for the first score of row i that is not finite.
template <class T>
void refuse_row(const PrunedRow<T>& p, int64_t i) {
  using Math = Wide<T>;
  for (int64_t j = 0; j < p.columns; ++j) {
    Math buffer;
    const Math w = *load_block(p.y + j, 1, &buffer), s = score_of(w, p.column_scale[j]);
    TORCH_CHECK_VALUE(std::isfinite(s), "y² · column_scale must be finite, got ", s, " of y = ", w,
                      " in row ", i, ", column ", j);
  }
}

// The loss, not yet scaled, of the rows that start at first_row; dcolumn_scale [columns] or null.
template <class T>
double importance(const PrunedRow<T>& first_row, int64_t rows, Wide<T>* dcolumn_scale) {
  using Math = Wide<T>;
  const RowChunks chunks(rows);
  const int64_t n = first_row.columns;
  std::vector<double> loss(rows);
  std::vector<Math> partial_scale(dcolumn_scale ? chunks.count() * n : 0);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    std::vector<OrderedKey<Math>> key(first_row.group == 0 ? n : 0);
    PrunedRow<T> p = first_row;
    p.key = key.data();
    p.dcolumn_scale = dcolumn_scale ? partial_scale.data() + k * n : nullptr;
    for (int64_t i = first; i < last; ++i) {
      p.y = first_row.y + i * n;
      p.dy = first_row.dy + i * n;
      loss[i] = DROT_SIMD_CALL(prune_row)(p);
      if (std::isnan(loss[i])) refuse_row(p, i);
    }
  });
  if (dcolumn_scale) sum_chunks(partial_scale, n, dcolumn_scale);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pruned_importance_cpu(
    const at::Tensor& y, const std::optional<at::Tensor>& column_scale, int64_t prune, int64_t group,
    double scale) {
  check_pruned_importance(y, column_scale, prune, group, scale);
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous();
  const at::Tensor factors = column_scale ? column_scale->contiguous() : at::ones({y.size(1)}, wide);
  TORCH_CHECK_VALUE(factors.isfinite().all().item<bool>(), "column_scale must be finite");
  TORCH_CHECK_VALUE(!factors.lt(0).any().item<bool>(), "column_scale must not be negative, got a minimum of ",
                    factors.min().item<double>());
  at::Tensor dy = empty_result(in);
  at::Tensor dcolumn_scale = at::zeros({column_scale ? y.size(1) : 0}, wide);
  double loss = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "pruned_importance", [&] {
    using T = Stored<scalar_t>;
    const PrunedRow<T> row{static_cast<const T*>(in.const_data_ptr()),
                           factors.const_data_ptr<Wide<T>>(),
                           y.size(1),
                           prune,
                           group,
                           static_cast<Wide<T>>(scale),
                           nullptr,
                           static_cast<T*>(dy.mutable_data_ptr()),
                           nullptr,
                           streams(dy)};
    loss = importance(row, y.size(0), column_scale ? dcolumn_scale.mutable_data_ptr<Wide<T>>() : nullptr);
  });
  return {at::scalar_tensor(scale * loss, wide), dy, dcolumn_scale};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("pruned_importance", &pruned_importance_cpu); }

}  // namespace drot
