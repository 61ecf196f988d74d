// The arithmetic of one element in skew_momentum, for its CPU and CUDA kernels.
#pragma once

#include "common/host_device.h"

namespace drot {

// Replaces the momentum by decay · momentum + s and returns Nesterov's sum s + decay · (the new momentum).
template <class T>
DROT_HOST_DEVICE T nesterov_sum(T s, T decay, T& momentum) {
  momentum = decay * momentum + s;
  return s + decay * momentum;
}

}  // namespace drot
