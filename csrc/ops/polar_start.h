// polar_start: the first polynomial of a polar factor, scaled by an estimate of the norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>

#include "common/checks.h"

namespace drot {

// squared, fourth [count, n, n] bf16.
inline void check_polar_start(const at::Tensor& squared, const at::Tensor& fourth, double a, double b,
                              double c, double margin) {
  TORCH_CHECK_VALUE(squared.dim() == 3, "squared must be [count, n, n], got ", squared.sizes());
  check_square(squared, "squared");
  check_dtype(squared, "squared", {at::kBFloat16});
  check_same_shape(fourth, "fourth", squared, "squared");
  check_same_dtype(fourth, "fourth", squared, "squared");
  check_same_device(fourth, "fourth", squared, "squared");
  TORCH_CHECK_VALUE(std::isfinite(a) && std::isfinite(b) && std::isfinite(c),
                    "a, b and c must be finite, got ", a, ", ", b, " and ", c);
  TORCH_CHECK_VALUE(margin > 0 && std::isfinite(margin), "margin must be above 0 and finite, got ", margin);
}

}  // namespace drot
