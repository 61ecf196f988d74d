#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <tuple>

#include "ops/cuda/entropy_loss_launch.cuh"
#include "ops/cuda/gpu.cuh"
#include "ops/entropy_loss.h"

namespace drot {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> entropy_loss_cuda(const at::Tensor& y,
                                                                 const std::optional<at::Tensor>& m,
                                                                 bool rows, bool columns, double scale) {
  check_entropy_loss(y, m, rows, columns, scale);
  check_fits_grid(y);
  const c10::cuda::CUDAGuard guard(y.device());
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor in = y.contiguous(), factor = m.has_value() ? m->contiguous() : at::Tensor();
  at::Tensor dy = at::empty(in.sizes(), in.options());
  at::Tensor dm = at::empty({m.has_value() ? y.size(1) : 0}, wide), loss = at::empty({}, wide);
  if (y.numel() == 0) return {loss.zero_(), dy, dm.zero_()};
  Gpu gpu(in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "entropy_loss", [&] {
    using Math = at::opmath_type<scalar_t>;
    const EntropyProblem<scalar_t> a{in.const_data_ptr<scalar_t>(),
                                     m.has_value() ? factor.const_data_ptr<Math>() : nullptr,
                                     y.size(0),
                                     y.size(1),
                                     scale,
                                     dy.mutable_data_ptr<scalar_t>(),
                                     m.has_value() ? dm.mutable_data_ptr<Math>() : nullptr,
                                     loss.mutable_data_ptr<Math>()};
    run_entropy_loss(gpu, a, rows, columns);
  });
  return {loss, dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("entropy_loss", &entropy_loss_cuda); }

}  // namespace drot
