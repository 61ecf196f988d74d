// entropy_loss on the GPU: the op. Its kernels are in entropy_loss_{rows,long_rows,columns}.cuh.
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <tuple>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/entropy_loss_launch.cuh"
#include "ops/entropy_loss.h"

namespace drot {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> entropy_loss_cuda(
    const at::Tensor& y, const std::optional<at::Tensor>& column_scale, bool rows, bool columns,
    double scale) {
  check_entropy_loss(y, column_scale, rows, columns, scale);
  check_fits_grid(y);
  const c10::cuda::CUDAGuard guard(y.device());
  const bool scaled = column_scale.has_value();
  const auto math = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor y_in = y.contiguous();
  const at::Tensor column_scale_in = scaled ? column_scale->contiguous() : at::Tensor();
  at::Tensor loss = at::empty({}, math);
  at::Tensor dy = at::empty(y.sizes(), y_in.options());
  at::Tensor dcolumn_scale = at::empty({scaled ? y.size(1) : 0}, math);
  if (y.numel() == 0) return {loss.zero_(), dy, dcolumn_scale.zero_()};
  Launcher launcher(y_in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "entropy_loss", [&] {
    using Math = at::opmath_type<scalar_t>;
    const EntropyProblem<scalar_t> problem{
        .y = y_in.const_data_ptr<scalar_t>(),
        .column_scale = scaled ? column_scale_in.const_data_ptr<Math>() : nullptr,
        .rows = y.size(0),
        .columns = y.size(1),
        .scale = scale,
        .dy = dy.mutable_data_ptr<scalar_t>(),
        .dcolumn_scale = scaled ? dcolumn_scale.mutable_data_ptr<Math>() : nullptr,
        .loss = loss.mutable_data_ptr<Math>()};
    run_entropy_loss(launcher, problem, rows, columns);
  });
  return {loss, dy, dcolumn_scale};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("entropy_loss", &entropy_loss_cuda); }

}  // namespace drot
