#include "ops/spectral_step.h"

#include <torch/library.h>

namespace drot {
namespace {

// Only a GPU has the kernel. A CPU checks the input, so that a wrong call is told apart from a right one.
void spectral_step_cpu(at::Tensor& q, at::Tensor& momentum, const at::Tensor& gradient,
                       const at::Tensor& unit, const at::Tensor& angle, double decay,
                       at::ArrayRef<double> polynomials, double margin) {
  check_spectral_step(q, momentum, gradient, unit, angle, decay, polynomials, margin);
  TORCH_CHECK_VALUE(false, "q must be on a GPU, because spectral_step has no CPU kernel, got ", q.device(),
                    "; SpectralStep of drot/rotation/retraction.py takes the step on a CPU");
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("spectral_step", &spectral_step_cpu); }

}  // namespace drot
