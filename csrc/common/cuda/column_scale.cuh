// How the kernels of entropy_loss and pruned_importance report an invalid column scale: the loss becomes NaN.
#pragma once

#include <cmath>

namespace drot {

// 0 for a valid column scale; NaN for a negative or non-finite column scale. Kernels add the result to the
// loss.
template <class Math>
__device__ Math nan_if_invalid_scale(Math column_scale) {
  return column_scale >= Math(0) ? column_scale - column_scale : static_cast<Math>(NAN);
}

}  // namespace drot
