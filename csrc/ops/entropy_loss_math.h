// The arithmetic of entropy_loss, for its CPU and CUDA kernels.
//
// For a group of scores s: Z = Σ s, T = Σ s log s, H = log Z - T/Z, ∂H/∂s = (T/Z - log s)/Z.
// A score of 0 adds nothing and has gradient 0 (0·log 0 = 0). So has every score of a group with Z = 0.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace drot {

template <class Math>
struct EntropySums {
  Math z = 0, t = 0;
};

template <class Math>
DROT_HOST_DEVICE Math entropy_of(const EntropySums<Math>& sums) {
  return sums.z == 0 ? Math(0) : std::log(sums.z) - sums.t / sums.z;
}

// scale · ∂H/∂s = weight · (mean_log - log s) with mean_log = T/Z, weight = scale/Z. Both stay in fp32's
// range where Z is near fp32's smallest number.
template <class Math>
struct EntropyGroup {
  Math mean_log = 0, weight = 0;
};

template <class Math>
DROT_HOST_DEVICE EntropyGroup<Math> entropy_group(const EntropySums<double>& sums, double scale) {
  if (sums.z == 0) return {};
  return {static_cast<Math>(sums.t / sums.z), static_cast<Math>(scale / sums.z)};
}

// The smallest normal number; a score below it counts as 0.
DROT_HOST_DEVICE constexpr float smallest_score(float) { return 0x1p-126f; }
DROT_HOST_DEVICE constexpr double smallest_score(double) { return 0x1p-1022; }

// Stands for log 0. It is lower than the logarithm of any number, and its product with 0 is 0.
constexpr double kNoLog = -1e30;

// Natural logarithm of a normal x > 0, within 1.4 units in the last place (1.3 with fused multiply-add), in a
// form that compilers vectorise: x = 2^e f with f in [2/3, 4/3), r = f - 1, log f = r - r²/2 + r³ P(r), where
// P is fitted for the smallest relative error of log f.
DROT_HOST_DEVICE float log_normal(float x) {
#ifdef __CUDA_ARCH__
  // The GPU's base-2 logarithm is one instruction instead of a dozen. Its error is about 2^-22, absolute near
  // x = 1 and relative elsewhere, which is less than the error of the sums of a group.
  float binary;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(binary) : "f"(x));
  return binary * 0.693147181f;
#else
  uint32_t bits;  // unsigned: the arithmetic below must be defined for a negative x too
  std::memcpy(&bits, &x, sizeof(bits));
  const int32_t e = static_cast<int32_t>(bits - 0x3f2aaaabu) >> 23;
  bits -= static_cast<uint32_t>(e) << 23;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  const float r = f - 1.0f;
  float p = 0.138202965f;
  p = p * r - 0.151222974f;
  p = p * r + 0.140422910f;
  p = p * r - 0.164723068f;
  p = p * r + 0.200079218f;
  p = p * r - 0.250042379f;
  p = p * r + 0.333332658f;
  p = p * r - 0.5f;
  return static_cast<float>(e) * 0.693147181f + (p * (r * r) + r);
#endif
}
DROT_HOST_DEVICE double log_normal(double x) { return ::log(x); }

// s, or 0 where it counts as 0. NaN is kept, and makes the sum NaN.
template <class Math>
DROT_HOST_DEVICE Math counted_score(Math s) {
  return s < smallest_score(Math{}) ? Math(0) : s;
}

// log s, or kNoLog where s counts as 0; any number for NaN. The logarithm is computed for every s, which
// needs no branch and cannot trap.
template <class Math>
DROT_HOST_DEVICE Math log_or_none(Math s) {
  const Math log = log_normal(s);
  return s < smallest_score(Math{}) ? Math(kNoLog) : log;
}

// scale · ∂H/∂s, from log = log_or_none(s).
template <class Math>
DROT_HOST_DEVICE Math entropy_slope(Math log, EntropyGroup<Math> group) {
  return log > Math(kNoLog) ? (group.mean_log - log) * group.weight : Math(0);
}

}  // namespace drot
