// What the ops on scores s = y²·m have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "common/checks.h"
#include "common/score_math.h"

namespace drot {

// The checks of their input. y [r, c], any float dtype; m [c] fp32,
// fp64 for fp64 y, or none.
inline void check_scores(const at::Tensor& y, const std::optional<at::Tensor>& m, double scale) {
  check_matrix(y, "y");
  check_dtype(y, "y", {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16});
  if (m.has_value()) {
    check_vector(*m, "m", y.size(1), "column");
    check_dtype(*m, "m", {y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat});
    check_same_device(*m, "m", y, "y");
  }
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale must be finite, got ", scale);
}

}  // namespace drot
