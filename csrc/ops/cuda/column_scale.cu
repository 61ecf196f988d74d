// column_scale and column_scale_backward on the GPU: the ops. Their kernels are in column_scale_strips.cuh.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/column_scale.h"
#include "ops/cuda/column_scale_strips.cuh"

namespace drot {
namespace {

at::Tensor column_scale_cuda(const at::Tensor& product, bool inverse) {
  check_column_scale(product);
  const c10::cuda::CUDAGuard guard(product.device());
  const at::Tensor in = product.contiguous();
  const int64_t count = in.size(0), rows = in.size(1), n = in.size(2);
  at::Tensor out = at::empty({count, n}, in.options().dtype(at::kFloat));
  if (out.numel() == 0) return out;
  TORCH_CHECK_VALUE(out.numel() <= INT32_MAX, "product must have less than 2^31 columns in all, got ",
                    product.sizes());
  Launcher launcher(in);
  run_column_scale(launcher, {.product = in.const_data_ptr<at::BFloat16>(),
                              .out = out.mutable_data_ptr<float>(),
                              .count = count,
                              .rows = rows,
                              .n = n,
                              .inverse = inverse});
  return out;
}

at::Tensor column_scale_backward_cuda(const at::Tensor& product, const at::Tensor& value,
                                      const at::Tensor& gradient, bool inverse) {
  check_column_scale_backward(product, value, gradient);
  const c10::cuda::CUDAGuard guard(product.device());
  const at::Tensor in = product.contiguous(), values = value.contiguous(), gradients = gradient.contiguous();
  at::Tensor out = at::empty(in.sizes(), in.options());
  if (out.numel() == 0) return out;
  const int64_t count = in.size(0), rows = in.size(1), n = in.size(2);
  TORCH_CHECK_VALUE(stack_tiles(count, rows, n) <= INT32_MAX, "product must have less than 2^31 tiles of ",
                    kStackRows, " x ", kStackColumns, ", got ", product.sizes());
  Launcher launcher(in);
  run_column_scale_backward(launcher, {.product = in.const_data_ptr<at::BFloat16>(),
                                       .value = values.const_data_ptr<float>(),
                                       .gradient = gradients.const_data_ptr<float>(),
                                       .out = out.mutable_data_ptr<at::BFloat16>(),
                                       .count = count,
                                       .rows = rows,
                                       .n = n,
                                       .inverse = inverse});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) {
  m.impl("column_scale", &column_scale_cuda);
  m.impl("column_scale_backward", &column_scale_backward_cuda);
}

}  // namespace drot
