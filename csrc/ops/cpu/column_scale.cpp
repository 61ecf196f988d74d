#include "ops/column_scale.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

namespace drot {
namespace {

constexpr int64_t kStrip = 128;  // columns that a thread adds at once

at::Tensor column_scale_cpu(const at::Tensor& product, bool inverse) {
  check_column_scale(product);
  const at::Tensor in = product.contiguous();
  const int64_t count = in.size(0), rows = in.size(1), n = in.size(2), strips = (n + kStrip - 1) / kStrip;
  at::Tensor out = at::empty({count, n}, in.options().dtype(at::kFloat));
  const at::BFloat16* p = in.const_data_ptr<at::BFloat16>();
  float* scale = out.mutable_data_ptr<float>();
  at::parallel_for(0, count * strips, 1, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      const int64_t matrix = at / strips, start = at % strips * kStrip, width = std::min(kStrip, n - start);
      double q[kStrip] = {};  // in fp64, because a column is added from one end to the other
      for (int64_t i = 0; i < rows; ++i) {
        const at::BFloat16* row = p + (matrix * rows + i) * n + start;
        for (int64_t j = 0; j < width; ++j) {
          const float x = row[j];
          q[j] += static_cast<double>(x) * x;
        }
      }
      for (int64_t j = 0; j < width; ++j) {
        scale[matrix * n + start + j] = scale_of_column(static_cast<float>(q[j]), inverse);
      }
    }
  });
  return out;
}

at::Tensor column_scale_backward_cpu(const at::Tensor& product, const at::Tensor& value,
                                     const at::Tensor& gradient, bool inverse) {
  check_column_scale_backward(product, value, gradient);
  const at::Tensor in = product.contiguous(), values = value.contiguous(), gradients = gradient.contiguous();
  at::Tensor out = at::empty(in.sizes(), in.options());
  const int64_t count = in.size(0), rows = in.size(1), n = in.size(2);
  const at::BFloat16* p = in.const_data_ptr<at::BFloat16>();
  const float *scale = values.const_data_ptr<float>(), *dscale = gradients.const_data_ptr<float>();
  at::BFloat16* scaled = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, count * rows, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t start = row / rows * n;
      for (int64_t j = 0; j < n; ++j) {
        const float dq = gradient_in_q(scale[start + j], dscale[start + j], inverse);
        scaled[row * n + j] = static_cast<float>(p[row * n + j]) * dq;
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) {
  m.impl("column_scale", &column_scale_cpu);
  m.impl("column_scale_backward", &column_scale_backward_cpu);
}

}  // namespace drot
