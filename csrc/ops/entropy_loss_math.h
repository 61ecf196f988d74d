// The arithmetic of entropy_loss, shared by both backends.
//
// Of a group of scores s: Z = Σ s, T = Σ s log s, H = log Z - T/Z, ∂H/∂s = -(log s - T/Z)/Z.
// A score of 0 adds nothing and has no gradient (0·log 0 = 0); nor has a group with Z = 0.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace drot {

template <class Math>
struct EntropySums {
  Math z = 0, t = 0;
};

// scale · ∂H/∂s = slope · log s + shift.
template <class Math>
struct EntropyGradient {
  Math slope = 0, shift = 0;
};

template <class Math>
DROT_HOST_DEVICE Math entropy_of(const EntropySums<Math>& sums) {
  return sums.z == 0 ? Math(0) : std::log(sums.z) - sums.t / sums.z;
}

template <class Math>
DROT_HOST_DEVICE EntropyGradient<Math> entropy_gradient(const EntropySums<Math>& sums, Math scale) {
  if (sums.z == 0) return {};
  const Math slope = -scale / sums.z;
  return {slope, -slope * (sums.t / sums.z)};
}

}  // namespace drot
