// The arithmetic of polar_start, for its CUDA kernels and that of spectral_step.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace drot {

// The coefficients of x (a + b xᵀx + c (xᵀx)²), and the norm that x shall have at most.
struct PolarCoefficients {
  float a, b, c, margin;
};

// Below this norm of u⁴ u counts as 0; its inverse is a number of fp32.
constexpr float kSmallestFourth = 1e-34f;

// The larger of two numbers, or NaN if one is NaN.
DROT_HOST_DEVICE float larger_or_nan(float x, float y) { return x > y || x != x ? x : y; }

// The factor of u that makes its norm `margin`, or less. norm_of_fourth: at least ‖u⁴‖₂; NaN gives NaN.
DROT_HOST_DEVICE float polar_scale(float norm_of_fourth, float margin) {
  const float norm = norm_of_fourth < kSmallestFourth ? kSmallestFourth : norm_of_fourth;
  return margin / std::sqrt(std::sqrt(norm));
}

// An element of p in u p = x (a + b xᵀx + c (xᵀx)²), for x = scale · u; xᵀx is -x². squared, fourth: the
// elements of u² and u⁴. They are scaled before they are multiplied by `scale` once more, so that nothing
// overflows.
DROT_HOST_DEVICE float polar_element(const PolarCoefficients& k, float scale, float squared, float fourth,
                                     bool diagonal) {
  const float square = scale * scale;
  const float sum = k.c * (square * (square * fourth)) - k.b * (square * squared);
  return scale * (diagonal ? k.a + sum : sum);
}

}  // namespace drot
