// spectral_step on the GPU: the op. Its kernel is in spectral_step_block.cuh.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/sparse24_mma.cuh"
#include "ops/cuda/spectral_step_block.cuh"
#include "ops/spectral_step.h"

namespace drot {
namespace {

void spectral_step_cuda(at::Tensor& q, at::Tensor& momentum, const at::Tensor& gradient,
                        const at::Tensor& unit, const at::Tensor& angle, double decay,
                        at::ArrayRef<double> polynomials, double margin) {
  check_spectral_step(q, momentum, gradient, unit, angle, decay, polynomials, margin);
  if (q.numel() == 0) return;
  TORCH_CHECK_VALUE(q.size(0) <= INT32_MAX, "q must have less than 2^31 matrices, got ", q.sizes());
  const c10::cuda::CUDAGuard guard(q.device());
  const at::Tensor slope = gradient.contiguous(), factors = angle.contiguous();
  Launcher launcher(q);
  run_spectral_step<Bf16Element>(
      launcher, {.q = q.mutable_data_ptr<float>(),
                 .momentum = reinterpret_cast<uint16_t*>(momentum.mutable_data_ptr<at::BFloat16>()),
                 .gradient = slope.const_data_ptr<float>(),
                 .unit = unit.const_data_ptr<float>(),
                 .angle = factors.const_data_ptr<float>(),
                 .count = q.size(0),
                 .n = static_cast<int>(q.size(1)),
                 .decay = static_cast<float>(decay),
                 .polynomials = spectral_polynomials(polynomials.data(), polynomials.size(), margin)});
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("spectral_step", &spectral_step_cuda); }

}  // namespace drot
