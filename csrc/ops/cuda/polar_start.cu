// polar_start on the GPU: the op. Its kernels are in polar_start_rows.cuh.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/polar_start_rows.cuh"
#include "ops/polar_start.h"

namespace drot {
namespace {

at::Tensor polar_start_cuda(const at::Tensor& squared, const at::Tensor& fourth, double a, double b, double c,
                            double margin) {
  check_polar_start(squared, fourth, a, b, c, margin);
  const c10::cuda::CUDAGuard guard(squared.device());
  const at::Tensor second = contiguous_aligned(squared), power = contiguous_aligned(fourth);
  at::Tensor out = at::empty(second.sizes(), second.options());
  if (out.numel() == 0) return out;
  const int64_t count = out.size(0), n = out.size(1);
  TORCH_CHECK_VALUE(count * n <= INT32_MAX, "squared must have less than 2^31 rows in all, got ",
                    squared.sizes());
  Launcher launcher(second);
  run_polar_start(launcher, {.squared = second.const_data_ptr<at::BFloat16>(),
                             .fourth = power.const_data_ptr<at::BFloat16>(),
                             .out = out.mutable_data_ptr<at::BFloat16>(),
                             .count = count,
                             .n = n,
                             .k = {static_cast<float>(a), static_cast<float>(b), static_cast<float>(c),
                                   static_cast<float>(margin)}});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("polar_start", &polar_start_cuda); }

}  // namespace drot
