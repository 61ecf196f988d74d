#include "ops/entropy_loss.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <numeric>
#include <tuple>
#include <vector>

#include "ops/cpu/entropy_loss_simd.h"
#include "ops/cpu/results.h"
#include "ops/cpu/row_chunks.h"

namespace drot {
namespace {

// What one call works on; the tensors are contiguous.
template <class T>
struct Problem {
  using Math = Wide<T>;
  const T* y;
  const Math* m;  // or null, for 1
  int64_t rows, columns;
  double scale;
  T* dy;
  Math* dm;  // or null
  bool stream;
};

void check_finite(const EntropySums<double>& sums, const char* name, int64_t index) {
  // T overflows a little before Z does
  TORCH_CHECK_VALUE(std::isfinite(sums.z) && std::isfinite(sums.t),
                    "y²·m must be finite, with finite sums, but ", name, " ", index, " sums to ", sums.z);
}

// Y is read once and dy written once: a row is still in the cache when its sums are known.
template <class T>
double entropy_of_rows(const Problem<T>& p) {
  using Math = Wide<T>;
  const RowChunks chunks(p.rows);
  const int64_t n = p.columns;
  std::vector<double> loss(p.rows);
  std::vector<Math> dm(p.dm ? chunks.count() * n : 0);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    std::vector<Math> logs(n);
    for (int64_t i = first; i < last; ++i) {
      const T* next = i + 1 < last ? p.y + (i + 1) * n : nullptr;
      const auto [sums, all_count] = DROT_SIMD_CALL(entropy_row_sums)(p.y + i * n, p.m, n, logs.data(), next);
      check_finite(sums, "row", i);
      loss[i] = entropy_of(sums);
      DROT_SIMD_CALL(entropy_row_gradient)
      (EntropyRow<T>{p.y + i * n, p.m, n, entropy_group<Math>(sums, p.scale), nullptr, nullptr, logs.data(),
                     all_count, p.dy + i * n, p.dm ? dm.data() + k * n : nullptr, p.stream});
    }
  });
  if (p.dm) sum_chunks(dm, n, p.dm);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

// Columns, and rows with them where by_row: a pass for the sums of both, one for the gradient.
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
      const auto sums = DROT_SIMD_CALL(entropy_add_row)(p.y + i * n, p.m, n, partial_z.data() + k * n,
                                                        partial_t.data() + k * n);
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

  std::vector<Math> dm(p.dm ? chunks.count() * n : 0);
  chunks.for_each([&](int64_t k, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      DROT_SIMD_CALL(entropy_row_gradient)
      (EntropyRow<T>{p.y + i * n, p.m, n, row_group[i], mean_log.data(), weight.data(), nullptr, false,
                     p.dy + i * n, p.dm ? dm.data() + k * n : nullptr, p.stream});
    }
  });
  if (p.dm) sum_chunks(dm, n, p.dm);
  return std::accumulate(loss.begin(), loss.end(), 0.0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> entropy_loss_cpu(const at::Tensor& y,
                                                                const std::optional<at::Tensor>& m, bool rows,
                                                                bool columns, double scale) {
  check_entropy_loss(y, m, rows, columns, scale);
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous();
  const at::Tensor factor = m.has_value() ? m->contiguous() : at::empty({0}, wide);
  TORCH_CHECK_VALUE(!factor.lt(0).any().item<bool>(), "m must not be negative, got a minimum of ",
                    factor.min().item<double>());
  at::Tensor dy = empty_result(in);
  at::Tensor dm = at::zeros({m.has_value() ? y.size(1) : 0}, wide);
  double loss = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "entropy_loss", [&] {
    using T = Stored<scalar_t>;
    const Problem<T> p{static_cast<const T*>(in.const_data_ptr()),
                       m.has_value() ? factor.const_data_ptr<Wide<T>>() : nullptr,
                       y.size(0),
                       y.size(1),
                       scale,
                       static_cast<T*>(dy.mutable_data_ptr()),
                       m.has_value() ? dm.mutable_data_ptr<Wide<T>>() : nullptr,
                       streams(dy)};
    loss = columns ? entropy_of_columns(p, rows) : entropy_of_rows(p);
  });
  return {at::scalar_tensor(scale * loss, wide), dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("entropy_loss", &entropy_loss_cpu); }

}  // namespace drot
