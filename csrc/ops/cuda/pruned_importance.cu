// pruned_importance on the GPU: the op. Its kernels are in pruned_importance_groups.cuh.
#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/pruned_importance_groups.cuh"
#include "ops/pruned_importance.h"

namespace drot {
namespace {

// The mask of groups that are whole rows, from nm_mask, which reads the scores from memory.
at::Tensor row_mask(const at::Tensor& y, const std::optional<at::Tensor>& column_scale, at::ScalarType math,
                    int64_t prune) {
  static const auto nm_mask = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("drot::nm_mask", "")
                                  .typed<at::Tensor(const at::Tensor&, int64_t, int64_t)>();
  const at::Tensor w = y.to(math);
  const at::Tensor score = at::mul(w, column_scale.has_value() ? at::mul(w, *column_scale) : w);
  return nm_mask.call(score, prune, /*group=*/0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pruned_importance_cuda(
    const at::Tensor& y, const std::optional<at::Tensor>& column_scale, int64_t prune, int64_t group,
    double scale) {
  check_pruned_importance(y, column_scale, prune, group, scale);
  check_fits_grid(y);
  const c10::cuda::CUDAGuard guard(y.device());
  const bool scaled = column_scale.has_value();
  const at::ScalarType math = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor y_in = y.contiguous();
  const at::Tensor column_scale_in = scaled ? column_scale->contiguous() : at::Tensor();
  at::Tensor loss = at::empty({}, y.options().dtype(math));
  at::Tensor dy = at::empty(y.sizes(), y_in.options());
  at::Tensor dcolumn_scale = at::empty({scaled ? y.size(1) : 0}, y.options().dtype(math));
  if (y.numel() == 0) return {loss.zero_(), dy, dcolumn_scale.zero_()};
  const at::Tensor removed = group == 0 ? row_mask(y_in, column_scale, math, prune) : at::Tensor();
  Launcher launcher(y_in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "pruned_importance", [&] {
    using Math = at::opmath_type<scalar_t>;
    const PrunedProblem<scalar_t> problem{
        .y = y_in.const_data_ptr<scalar_t>(),
        .column_scale = scaled ? column_scale_in.const_data_ptr<Math>() : nullptr,
        .removed = removed.defined() ? removed.const_data_ptr<bool>() : nullptr,
        .rows = y.size(0),
        .columns = y.size(1),
        .group = static_cast<int>(std::max<int64_t>(group, 1)),
        .prune = static_cast<int>(prune),
        .scale = scale,
        .dy = dy.mutable_data_ptr<scalar_t>(),
        .dcolumn_scale = scaled ? dcolumn_scale.mutable_data_ptr<Math>() : nullptr,
        .loss = loss.mutable_data_ptr<Math>()};
    run_pruned_importance(launcher, problem);
  });
  return {loss, dy, dcolumn_scale};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("pruned_importance", &pruned_importance_cuda); }

}  // namespace drot
