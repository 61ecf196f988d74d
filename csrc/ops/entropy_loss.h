// entropy_loss: Σ of the entropies of the rows and/or columns of s = y² · column_scale, and its gradients.
#pragma once

#include "common/score_checks.h"

namespace drot {

inline void check_entropy_loss(const at::Tensor& y, const std::optional<at::Tensor>& column_scale, bool rows,
                               bool columns, double scale) {
  check_scores(y, column_scale, scale);
  TORCH_CHECK_VALUE(rows || columns, "entropy_loss needs rows=True, columns=True or both, got neither");
}

}  // namespace drot
