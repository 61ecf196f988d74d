// Input checks of the ops on scores s = y² · column_scale: entropy_loss and pruned_importance.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "common/checks.h"
#include "common/score_math.h"

namespace drot {

// y [rows, columns], any float dtype; column_scale [columns], fp32 (fp64 for fp64 y), or none for 1.
inline void check_scores(const at::Tensor& y, const std::optional<at::Tensor>& column_scale, double scale) {
  check_matrix(y, "y");
  check_dtype(y, "y", {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16});
  if (column_scale.has_value()) {
    check_vector(*column_scale, "column_scale", y.size(1), "column");
    check_dtype(*column_scale, "column_scale", {y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat});
    check_same_device(*column_scale, "column_scale", y, "y");
  }
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale must be finite, got ", scale);
}

}  // namespace drot
