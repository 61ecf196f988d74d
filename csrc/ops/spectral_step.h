// spectral_step: one step of a stack of small orthogonal matrices in so(n), with its momentum.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>

#include "common/checks.h"
#include "ops/spectral_step_math.h"

namespace drot {

// q, gradient [count, n, n] fp32, momentum [count, n, n] bf16, unit [] fp32, angle [2] fp32. q and momentum
// are contiguous, because they are written in place.
inline void check_spectral_step(const at::Tensor& q, const at::Tensor& momentum, const at::Tensor& gradient,
                                const at::Tensor& unit, const at::Tensor& angle, double decay,
                                at::ArrayRef<double> polynomials, double margin) {
  TORCH_CHECK_VALUE(q.dim() == 3 && q.size(1) == q.size(2), "q must be [count, n, n], got ", q.sizes());
  TORCH_CHECK_VALUE(q.size(1) % 16 == 0 && q.size(1) >= 16 && q.size(1) <= kMostSpectralSide,
                    "n must be a multiple of 16 from 16 to ", kMostSpectralSide, ", got ", q.size(1));
  check_dtype(q, "q", {at::kFloat});
  TORCH_CHECK_VALUE(q.is_contiguous(), "q must be contiguous, got strides ", q.strides());
  check_same_shape(momentum, "momentum", q, "q");
  check_dtype(momentum, "momentum", {at::kBFloat16});
  check_same_device(momentum, "momentum", q, "q");
  TORCH_CHECK_VALUE(momentum.is_contiguous(), "momentum must be contiguous, got strides ",
                    momentum.strides());
  check_same_shape(gradient, "gradient", q, "q");
  check_dtype(gradient, "gradient", {at::kFloat});
  check_same_device(gradient, "gradient", q, "q");
  TORCH_CHECK_VALUE(unit.dim() == 0, "unit must be a tensor of no dimensions, got ", unit.sizes());
  check_dtype(unit, "unit", {at::kFloat});
  check_same_device(unit, "unit", q, "q");
  TORCH_CHECK_VALUE(angle.dim() == 1 && angle.size(0) == 2, "angle must be [2], got ", angle.sizes());
  check_dtype(angle, "angle", {at::kFloat});
  check_same_device(angle, "angle", q, "q");
  TORCH_CHECK_VALUE(std::isfinite(decay), "decay must be finite, got ", decay);
  TORCH_CHECK_VALUE(margin > 0 && std::isfinite(margin), "margin must be above 0 and finite, got ", margin);
  const size_t numbers = polynomials.size();
  TORCH_CHECK_VALUE(numbers % 3 == 0 && numbers >= 3 && numbers <= 3 * (1 + kMostFurtherPolynomials),
                    "polynomials must hold a, b and c of 1 to ", 1 + kMostFurtherPolynomials,
                    " polynomials, got ", numbers, " numbers");
  for (size_t i = 0; i < numbers; ++i) {
    TORCH_CHECK_VALUE(std::isfinite(polynomials[i]), "polynomials must be finite, got ", polynomials);
    TORCH_CHECK_VALUE(i < 3 || i % 3 != 2 || polynomials[i] >= 0,
                      "c of every polynomial but the first must be at least 0, got ", polynomials);
  }
}

}  // namespace drot
