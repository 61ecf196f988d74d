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

#include "ops/cpu/pruned_importance_simd.h"
#include "ops/cpu/results.h"
#include "ops/cpu/row_chunks.h"

namespace drot {
namespace {

template <class T>
void refuse_row(const PrunedRow<T>& p, int64_t i) {
  using Math = Wide<T>;
  for (int64_t j = 0; j < p.columns; ++j) {
    Math buffer;
    const Math w = *load_block(p.y + j, 1, &buffer), s = score_of(w, p.m[j]);
    TORCH_CHECK_VALUE(std::isfinite(s), "y²·m must be finite, got ", s, " of y = ", w, " in row ", i,
                      ", column ", j);
  }
}

// The loss, not yet scaled, of the rows that start at first.y and first.dy; dm [columns] or null.
template <class T>
double importance(const PrunedRow<T>& first_row, int64_t rows, Wide<T>* dm) {
  using Math = Wide<T>;
  const RowChunks chunks(rows);
  const int64_t n = first_row.columns;
  std::vector<double> loss(rows);
  std::vector<Math> dm_partial(dm ? chunks.count() * n : 0);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    std::vector<OrderedKey<Math>> key(first_row.group == 0 ? n : 0);
    PrunedRow<T> p = first_row;
    p.key = key.data();
    p.dm = dm ? dm_partial.data() + k * n : nullptr;
    for (int64_t i = first; i < last; ++i) {
      p.y = first_row.y + i * n;
      p.dy = first_row.dy + i * n;
      loss[i] = DROT_SIMD_CALL(prune_row)(p);
      if (std::isnan(loss[i])) refuse_row(p, i);
    }
  });
  if (dm) sum_chunks(dm_partial, n, dm);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pruned_importance_cpu(const at::Tensor& y,
                                                                     const std::optional<at::Tensor>& m,
                                                                     int64_t prune, int64_t group,
                                                                     double scale) {
  check_pruned_importance(y, m, prune, group, scale);
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous();
  const at::Tensor factor = m.has_value() ? m->contiguous() : at::ones({y.size(1)}, wide);
  TORCH_CHECK_VALUE(factor.isfinite().all().item<bool>(), "m must be finite");
  TORCH_CHECK_VALUE(!factor.lt(0).any().item<bool>(), "m must not be negative, got a minimum of ",
                    factor.min().item<double>());
  at::Tensor dy = empty_result(in);
  at::Tensor dm = at::zeros({m.has_value() ? y.size(1) : 0}, wide);
  double loss = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "pruned_importance", [&] {
    using T = Stored<scalar_t>;
    const PrunedRow<T> row{static_cast<const T*>(in.const_data_ptr()),
                           factor.const_data_ptr<Wide<T>>(),
                           y.size(1),
                           prune,
                           group,
                           static_cast<Wide<T>>(scale),
                           nullptr,
                           static_cast<T*>(dy.mutable_data_ptr()),
                           nullptr,
                           streams(dy)};
    loss = importance(row, y.size(0), m.has_value() ? dm.mutable_data_ptr<Wide<T>>() : nullptr);
  });
  return {at::scalar_tensor(scale * loss, wide), dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("pruned_importance", &pruned_importance_cpu); }

}  // namespace drot
