// The arithmetic of turn_start, for its CUDA kernel.
#pragma once

#include "common/host_device.h"

namespace drot {

// An element of ½ · 1 + factor · j. j: the element of the matrix j.
DROT_HOST_DEVICE float turn_change(float factor, float j, bool diagonal) {
  return diagonal ? 0.5f + factor * j : factor * j;
}

}  // namespace drot
