// The arithmetic of one element in skew_momentum, for its CPU and CUDA kernels.
#pragma once

#include "common/host_device.h"

namespace drot {

// Replaces the momentum by decay · momentum + s and returns Nesterov's sum s + decay · (the new momentum).
// The sum takes the new momentum before it is rounded to M.
template <class T, class M>
DROT_HOST_DEVICE T nesterov_sum(T s, T decay, M& momentum) {
  const T updated = decay * static_cast<T>(momentum) + s;
  momentum = static_cast<M>(updated);
  return s + decay * updated;
}

}  // namespace drot
