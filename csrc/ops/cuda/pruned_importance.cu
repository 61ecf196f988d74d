#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "ops/cuda/gpu.cuh"
#include "ops/cuda/pruned_importance_groups.cuh"
#include "ops/pruned_importance.h"

namespace drot {
namespace {

// The mask of whole rows comes from nm_mask, which needs the scores in memory.
at::Tensor row_mask(const at::Tensor& y, const std::optional<at::Tensor>& m, at::ScalarType wide,
                    int64_t prune) {
  static const auto nm_mask = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("drot::nm_mask", "")
                                  .typed<at::Tensor(const at::Tensor&, int64_t, int64_t)>();
  const at::Tensor w = y.to(wide);
  return nm_mask.call(at::mul(w, m.has_value() ? at::mul(w, *m) : w), prune, 0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pruned_importance_cuda(const at::Tensor& y,
                                                                      const std::optional<at::Tensor>& m,
                                                                      int64_t prune, int64_t group,
                                                                      double scale) {
  check_pruned_importance(y, m, prune, group, scale);
  check_fits_grid(y);
  const c10::cuda::CUDAGuard guard(y.device());
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous(), factor = m.has_value() ? m->contiguous() : at::Tensor();
  at::Tensor dy = at::empty(in.sizes(), in.options());
  at::Tensor dm = at::empty({m.has_value() ? y.size(1) : 0}, wide), loss = at::empty({}, wide);
  if (y.numel() == 0) return {loss.zero_(), dy, dm.zero_()};
  const at::Tensor removed = group == 0 ? row_mask(in, m, wide.dtype().toScalarType(), prune) : at::Tensor();
  Gpu gpu(in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "pruned_importance", [&] {
    using Math = at::opmath_type<scalar_t>;
    const PrunedProblem<scalar_t> a{in.const_data_ptr<scalar_t>(),
                                    m.has_value() ? factor.const_data_ptr<Math>() : nullptr,
                                    removed.defined() ? removed.const_data_ptr<bool>() : nullptr,
                                    y.size(0),
                                    y.size(1),
                                    static_cast<int>(std::max<int64_t>(group, 1)),
                                    static_cast<int>(prune),
                                    scale,
                                    dy.mutable_data_ptr<scalar_t>(),
                                    m.has_value() ? dm.mutable_data_ptr<Math>() : nullptr,
                                    loss.mutable_data_ptr<Math>()};
    run_pruned_importance(gpu, a);
  });
  return {loss, dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("pruned_importance", &pruned_importance_cuda); }

}  // namespace drot
