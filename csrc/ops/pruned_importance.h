// pruned_importance: the sum of the scores s = y²·m that a mask removes, with its gradient.
#pragma once

#include "common/selection_math.h"
#include "ops/scores.h"

namespace drot {

inline void check_pruned_importance(const at::Tensor& y, const std::optional<at::Tensor>& m, int64_t prune,
                                    int64_t group, double scale) {
  check_scores(y, m, scale);
  check_groups(prune, group, y.size(1), kMaxGroup);
}

}  // namespace drot
