// pruned_importance: Σ of the scores s = y² · column_scale that a mask removes, and its gradients.
#pragma once

#include "common/score_checks.h"
#include "common/selection_math.h"

namespace drot {

inline void check_pruned_importance(const at::Tensor& y, const std::optional<at::Tensor>& column_scale,
                                    int64_t prune, int64_t group, double scale) {
  check_scores(y, column_scale, scale);
  check_groups(prune, group, y.size(1), kMaxGroup);
}

}  // namespace drot
