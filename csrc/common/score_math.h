// The score of a weight, shared by every op and both backends.
#pragma once

#include "common/host_device.h"

namespace drot {

// s = y²·m, multiplied in the order that loses the least to underflow: y² alone may be too small
// for its type where y²·m is not.
template <class Math>
DROT_HOST_DEVICE Math score_of(Math y, Math m) {
  return y * (y * m);
}

}  // namespace drot
