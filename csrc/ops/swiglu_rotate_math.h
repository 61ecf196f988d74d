// The arithmetic of swiglu_rotate, for its CPU and CUDA kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace drot {

// e^x within 2 units in the last place for x in [-87, 88], in a form that compilers vectorise: x = n log 2 +
// r with a whole n, |r| <= log(2)/2, and the Taylor polynomial of degree 7 of e^r. Above the range it is
// infinite, below it e^-87, and NaN gives an arbitrary number.
DROT_HOST_DEVICE float bounded_exp(float exponent) {
  float x = exponent < -87.0f ? -87.0f : exponent;
  x = x > 88.0f ? 88.0f : x;
  constexpr float kRounding = 0x1.8p23f;  // the sum has no bits behind the point
  const float n = (x * 1.44269504f + kRounding) - kRounding;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log 2 in two terms; the first is exact
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return exponent > 88.0f ? __builtin_huge_valf() : p * power;
}

// SiLU(gate) · up. A NaN of either is NaN.
DROT_HOST_DEVICE float swiglu(float gate, float up) { return gate / (1.0f + bounded_exp(-gate)) * up; }

}  // namespace drot
