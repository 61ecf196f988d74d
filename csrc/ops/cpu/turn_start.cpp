#include "ops/turn_start.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

namespace drot {
namespace {

std::tuple<at::Tensor, at::Tensor> turn_start_cpu(const at::Tensor& j, const at::Tensor& angle) {
  check_turn_start(j, angle);
  const at::Tensor in = j.contiguous(), factors = angle.contiguous();
  at::Tensor change = at::empty(in.sizes(), in.options()), scaled = at::empty(in.sizes(), in.options());
  const int64_t count = in.size(0), n = in.size(1);
  const at::BFloat16* x = in.const_data_ptr<at::BFloat16>();
  const float* factor = factors.const_data_ptr<float>();
  at::BFloat16 *first_out = change.mutable_data_ptr<at::BFloat16>(),
               *second_out = scaled.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, count * n, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        const int64_t at = row * n + column;
        const float element = x[at];
        first_out[at] = turn_change(factor[0], element, column == row % n);
        second_out[at] = factor[1] * element;
      }
    }
  });
  return {change, scaled};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("turn_start", &turn_start_cpu); }

}  // namespace drot
