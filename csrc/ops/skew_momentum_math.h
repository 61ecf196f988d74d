// The arithmetic of one element in skew_momentum, for its CUDA kernel.
#pragma once

#include <cmath>

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

// Replaces Adam's moments by decay · momentum + s and square_decay · square + s², and returns the ratio of
// the new momentum to the root of the new square. Where the new square is 0, so is the ratio. The ratio takes
// the new moments before they are rounded to M and V.
template <class T, class M, class V>
DROT_HOST_DEVICE T adam_ratio(T s, T decay, T square_decay, M& momentum, V& square) {
  const T updated = decay * static_cast<T>(momentum) + s;
  const T squares = square_decay * static_cast<T>(square) + s * s;
  momentum = static_cast<M>(updated);
  square = static_cast<V>(squares);
  return squares == 0 ? T(0) : updated / std::sqrt(squares);
}

}  // namespace drot
