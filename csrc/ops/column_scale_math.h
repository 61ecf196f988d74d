// The arithmetic of column_scale and column_scale_backward, for their CPU and CUDA kernels.
#pragma once

#include "common/host_device.h"

namespace drot {

// The scale of a column whose squares sum to q: q, or 1/q, which is inf for q = 0.
DROT_HOST_DEVICE float scale_of_column(float q, bool inverse) { return inverse ? 1.0f / q : q; }

// d loss/d q of a column from its scale and d loss/d scale. The gradient is multiplied by the scale twice:
// the square of a large scale would overflow.
DROT_HOST_DEVICE float gradient_in_q(float scale, float gradient, bool inverse) {
  return inverse ? -(gradient * scale) * scale : gradient;
}

}  // namespace drot
