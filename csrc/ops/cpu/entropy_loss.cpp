#include "ops/entropy_loss.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <numeric>
#include <tuple>
#include <vector>

#include "ops/cpu/entropy_loss_rows.h"
#include "ops/cpu/row_chunks.h"

namespace drot {
namespace {

// What one call works on; the tensors are contiguous.
template <class T, class Math>
struct Problem {
  const T* y;
  const Math* m;  // or null
  int64_t rows, columns;
  bool by_row, by_column;
  Math scale;
  T* dy;
  Math* dm;  // or null
};

// Σ of the entropies of the columns; their gradients go into slope and shift [columns].
template <class T, class Math>
double column_statistics(const Problem<T, Math>& p, std::vector<Math>& slope, std::vector<Math>& shift) {
  const int64_t chunks = chunks_of(p.rows), n = p.columns;
  std::vector<Math> z(chunks * n), t(chunks * n);
  for_each_chunk(p.rows, [&](int64_t k, int64_t first, int64_t last) {
    std::vector<Math> logs(n);
    for (int64_t i = first; i < last; ++i) {
      row_logs(p.y + i * n, p.m, n, logs.data());
      add_to_columns(p.y + i * n, p.m, logs.data(), n, z.data() + k * n, t.data() + k * n);
    }
  });
  slope.resize(n);
  shift.resize(n);
  sum_chunks(z, chunks, n, slope.data());
  sum_chunks(t, chunks, n, shift.data());
  double loss = 0;
  for (int64_t j = 0; j < n; ++j) {
    const EntropySums<Math> sums{slope[j], shift[j]};
    TORCH_CHECK_VALUE(std::isfinite(sums.z), "y²·m must be finite, but column ", j, " sums to ", sums.z);
    const EntropyGradient<Math> gradient = entropy_gradient(sums, p.scale);
    loss += entropy_of(sums);
    slope[j] = gradient.slope;
    shift[j] = gradient.shift;
  }
  return loss;
}

// The loss, not yet scaled.
template <class T, class Math>
double entropy(const Problem<T, Math>& p) {
  const int64_t chunks = chunks_of(p.rows), n = p.columns;
  std::vector<Math> slope, shift;
  const double by_column = p.by_column ? column_statistics(p, slope, shift) : 0;
  std::vector<double> loss(p.rows);
  std::vector<Math> dm(p.dm ? chunks * n : 0);
  for_each_chunk(p.rows, [&](int64_t k, int64_t first, int64_t last) {
    std::vector<Math> logs(n);
    for (int64_t i = first; i < last; ++i) {
      const EntropySums<Math> sums = row_logs(p.y + i * n, p.m, n, logs.data());
      TORCH_CHECK_VALUE(std::isfinite(sums.z), "y²·m must be finite, but row ", i, " sums to ", sums.z);
      EntropyGradient<Math> row;
      if (p.by_row) {
        loss[i] = entropy_of(sums);
        row = entropy_gradient(sums, p.scale);
      }
      row_gradient(p.y + i * n, p.m, logs.data(), n, row, p.by_column ? slope.data() : nullptr,
                   p.by_column ? shift.data() : nullptr, p.dy + i * n, p.dm ? dm.data() + k * n : nullptr);
    }
  });
  if (p.dm) sum_chunks(dm, chunks, n, p.dm);
  return std::accumulate(loss.begin(), loss.end(), by_column);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> entropy_loss_cpu(const at::Tensor& y,
                                                                const std::optional<at::Tensor>& m, bool rows,
                                                                bool columns, double scale) {
  check_entropy_loss(y, m, rows, columns, scale);
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous();
  const at::Tensor factor = m.has_value() ? m->to(at::kDouble).contiguous() : at::Tensor();
  TORCH_CHECK_VALUE(!factor.defined() || !factor.lt(0).any().item<bool>(),
                    "m must not be negative, got a minimum of ", factor.min().item<double>());
  at::Tensor dy = at::empty(in.sizes(), in.options());
  at::Tensor dm = at::zeros({m.has_value() ? y.size(1) : 0}, wide.dtype(at::kDouble));
  double loss = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "entropy_loss", [&] {
    loss = entropy(Problem<scalar_t, double>{
        in.const_data_ptr<scalar_t>(), factor.defined() ? factor.const_data_ptr<double>() : nullptr,
        y.size(0), y.size(1), rows, columns, scale, dy.mutable_data_ptr<scalar_t>(),
        factor.defined() ? dm.mutable_data_ptr<double>() : nullptr});
  });
  return {at::scalar_tensor(scale * loss, wide), dy, dm.to(wide.dtype())};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("entropy_loss", &entropy_loss_cpu); }

}  // namespace drot
