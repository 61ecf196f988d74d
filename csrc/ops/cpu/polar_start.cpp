#include "ops/polar_start.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

namespace drot {
namespace {

at::Tensor polar_start_cpu(const at::Tensor& squared, const at::Tensor& fourth, double a, double b, double c,
                           double margin) {
  const PolarCoefficients k{static_cast<float>(a), static_cast<float>(b), static_cast<float>(c),
                            static_cast<float>(margin)};
  check_polar_start(squared, fourth, k);
  const at::Tensor second = squared.contiguous(), power = fourth.contiguous();
  at::Tensor out = at::empty(second.sizes(), second.options());
  const int64_t count = out.size(0), n = out.size(1);
  const at::BFloat16* x2 = second.const_data_ptr<at::BFloat16>();
  const at::BFloat16* x4 = power.const_data_ptr<at::BFloat16>();
  at::BFloat16* p = out.mutable_data_ptr<at::BFloat16>();
  std::vector<float> rows(static_cast<size_t>(count * n));
  at::parallel_for(0, count * n, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += std::abs(static_cast<float>(x4[row * n + j]));
      rows[static_cast<size_t>(row)] = sum;
    }
  });
  at::parallel_for(0, count * n, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float norm = 0;
      for (int64_t i = row / n * n; i < (row / n + 1) * n; ++i) {
        norm = larger_or_nan(rows[static_cast<size_t>(i)], norm);
      }
      const float scale = polar_scale(norm, k.margin);
      for (int64_t j = 0; j < n; ++j) {
        p[row * n + j] = polar_element(k, scale, x2[row * n + j], x4[row * n + j], j == row % n);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("polar_start", &polar_start_cpu); }

}  // namespace drot
