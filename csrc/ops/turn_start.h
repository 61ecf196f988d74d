// turn_start: the two matrices that a turn is computed from.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/checks.h"
#include "ops/turn_start_math.h"

namespace drot {

// j [count, n, n] bf16; angle [2] fp32, on its device.
inline void check_turn_start(const at::Tensor& j, const at::Tensor& angle) {
  TORCH_CHECK_VALUE(j.dim() == 3, "j must be [count, n, n], got ", j.sizes());
  check_square(j, "j");
  check_dtype(j, "j", {at::kBFloat16});
  TORCH_CHECK_VALUE(angle.dim() == 1 && angle.size(0) == 2,
                    "angle must be [2], the factors of j in change and in scaled, got ", angle.sizes());
  check_dtype(angle, "angle", {at::kFloat});
  check_same_device(angle, "angle", j, "j");
}

}  // namespace drot
