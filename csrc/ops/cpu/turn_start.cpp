#include "ops/turn_start.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

namespace drot {
namespace {

std::tuple<at::Tensor, at::Tensor> turn_start_cpu(const at::Tensor& j, const at::Tensor& angle,
                                                  const std::optional<at::Tensor>& scale) {
  check_turn_start(j, angle, scale);
  const at::Tensor in = j.contiguous(), factors = angle.contiguous();
  at::Tensor change = at::empty(in.sizes(), in.options()), scaled = at::empty(in.sizes(), in.options());
  const int64_t count = in.size(0), n = in.size(1);
  const at::BFloat16* x = in.const_data_ptr<at::BFloat16>();
  const float* factor = factors.const_data_ptr<float>();
  const at::BFloat16* of_matrix = scale ? scale->const_data_ptr<at::BFloat16>() : nullptr;
  const int64_t stride = scale ? scale->stride(0) : 0;
  at::BFloat16 *first_out = change.mutable_data_ptr<at::BFloat16>(),
               *second_out = scaled.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, count * n, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float s = of_matrix ? static_cast<float>(of_matrix[row / n * stride]) : 1.0f;
      const float linear = s * factor[0], square = s * s * factor[1];
      for (int64_t column = 0; column < n; ++column) {
        const int64_t at = row * n + column;
        const float element = x[at];
        first_out[at] = turn_change(linear, element, column == row % n);
        second_out[at] = square * element;
      }
    }
  });
  return {change, scaled};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("turn_start", &turn_start_cpu); }

}  // namespace drot
