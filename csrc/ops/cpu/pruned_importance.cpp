#include "ops/pruned_importance.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "ops/cpu/row_chunks.h"

namespace drot {
namespace {

// Which of the scores of one row go, as 0 or 1; key is scratch of the row's length.
template <class Math>
void select_in_row(const Math* s, int64_t columns, int64_t prune, OrderedKey<Math>* key, uint8_t* removed) {
  if (prune == 0 || prune == columns) {
    std::fill(removed, removed + columns, prune != 0);
    return;
  }
  for (int64_t j = 0; j < columns; ++j) key[j] = ordered_key(s[j]);
  std::nth_element(key, key + (prune - 1), key + columns);
  const OrderedKey<Math> last = key[prune - 1];
  int64_t ties = prune - std::count_if(key, key + prune, [&](auto k) { return k < last; });
  for (int64_t j = 0; j < columns; ++j) {
    const OrderedKey<Math> k = ordered_key(s[j]);
    removed[j] = k < last || (k == last && ties-- > 0);
  }
}

template <class Math>
void select_in_groups(const Math* s, int64_t columns, int prune, int group, uint8_t* removed) {
  for (int64_t start = 0; start < columns; start += group) {
    const uint32_t bits = removed_bits(s + start, group, prune);
    for (int i = 0; i < group; ++i) removed[start + i] = bits >> i & 1;
  }
}

// The loss, not yet scaled. m, dm [columns] or null; dm is added to.
template <class T, class Math>
double importance(const T* y, const Math* m, int64_t rows, int64_t columns, int64_t prune, int64_t group,
                  Math scale, T* dy, Math* dm) {
  const int64_t chunks = chunks_of(rows);
  std::vector<double> loss(rows);
  std::vector<Math> dm_partial(dm ? chunks * columns : 0);
  for_each_chunk(rows, [&](int64_t k, int64_t first, int64_t last) {
    std::vector<Math> s(columns);
    std::vector<OrderedKey<Math>> key(group == 0 ? columns : 0);
    std::vector<uint8_t> removed(columns);
    for (int64_t i = first; i < last; ++i) {
      const T* row = y + i * columns;
      for (int64_t j = 0; j < columns; ++j) {
        const Math w = static_cast<Math>(row[j]);
        TORCH_CHECK_VALUE(std::isfinite(w), "y must be finite, got ", w, " in row ", i, ", column ", j);
        s[j] = score_of(w, m ? m[j] : Math(1));
      }
      if (group == 0) {
        select_in_row(s.data(), columns, prune, key.data(), removed.data());
      } else {
        select_in_groups(s.data(), columns, static_cast<int>(prune), static_cast<int>(group), removed.data());
      }
      for (int64_t j = 0; j < columns; ++j) {
        const Math w = static_cast<Math>(row[j]), gone = removed[j] ? scale : Math(0);
        loss[i] += removed[j] ? s[j] : 0;
        dy[i * columns + j] = static_cast<T>(2 * (w * (m ? m[j] : Math(1))) * gone);
        if (dm) dm_partial[k * columns + j] += w * w * gone;
      }
    }
  });
  if (dm) sum_chunks(dm_partial, chunks, columns, dm);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pruned_importance_cpu(const at::Tensor& y,
                                                                     const std::optional<at::Tensor>& m,
                                                                     int64_t prune, int64_t group,
                                                                     double scale) {
  check_pruned_importance(y, m, prune, group, scale);
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous();
  const at::Tensor factor = m.has_value() ? m->contiguous() : at::Tensor();
  if (factor.defined()) {
    TORCH_CHECK_VALUE(factor.isfinite().all().item<bool>(), "m must be finite");
    TORCH_CHECK_VALUE(!factor.lt(0).any().item<bool>(), "m must not be negative");
  }
  at::Tensor dy = at::empty(in.sizes(), in.options());
  at::Tensor dm = at::zeros({m.has_value() ? y.size(1) : 0}, wide);
  double loss = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "pruned_importance", [&] {
    using Math = at::opmath_type<scalar_t>;
    loss = importance<scalar_t, Math>(
        in.const_data_ptr<scalar_t>(), factor.defined() ? factor.const_data_ptr<Math>() : nullptr, y.size(0),
        y.size(1), prune, group, static_cast<Math>(scale), dy.mutable_data_ptr<scalar_t>(),
        factor.defined() ? dm.mutable_data_ptr<Math>() : nullptr);
  });
  return {at::scalar_tensor(scale * loss, wide), dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("pruned_importance", &pruned_importance_cpu); }

}  // namespace drot
