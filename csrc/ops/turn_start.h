// turn_start: the two matrices that a turn is computed from.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/checks.h"
#include "ops/turn_start_math.h"

namespace drot {

// j [count, n, n] bf16; angle [2] fp32 and scale [count] bf16, on its device.
inline void check_turn_start(const at::Tensor& j, const at::Tensor& angle,
                             const std::optional<at::Tensor>& scale) {
  TORCH_CHECK_VALUE(j.dim() == 3, "j must be [count, n, n], got ", j.sizes());
  check_square(j, "j");
  check_dtype(j, "j", {at::kBFloat16});
  TORCH_CHECK_VALUE(angle.dim() == 1 && angle.size(0) == 2,
                    "angle must be [2], the factors of j in change and in scaled, got ", angle.sizes());
  check_dtype(angle, "angle", {at::kFloat});
  check_same_device(angle, "angle", j, "j");
  if (!scale) return;
  TORCH_CHECK_VALUE(scale->dim() == 1 && scale->size(0) == j.size(0), "scale must be [", j.size(0),
                    "], a factor for each matrix of j, got ", scale->sizes());
  check_same_dtype(*scale, "scale", j, "j");
  check_same_device(*scale, "scale", j, "j");
}

}  // namespace drot
