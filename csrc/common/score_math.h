// The score of a weight, for the CPU and the CUDA kernels of entropy_loss and pruned_importance.
#pragma once

#include "common/host_device.h"

namespace drot {

// s = y² · column_scale. The order of the products underflows least: y² may be too small for its type where s
// is not.
template <class Math>
DROT_HOST_DEVICE Math score_of(Math y, Math column_scale) {
  return y * (y * column_scale);
}

}  // namespace drot
