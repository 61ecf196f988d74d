// nm_mask: which scores of a matrix are removed, n:m or the smallest k of each row.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/checks.h"
#include "common/selection_math.h"

namespace drot {

// The checks of both backends. score [r, c], any float dtype; group 1 … kMaxGroup, or 0 for a row.
inline void check_nm_mask(const at::Tensor& score, int64_t prune, int64_t group) {
  check_matrix(score, "score");
  check_dtype(score, "score", {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16});
  check_groups(prune, group, score.size(1), kMaxGroup);
}

}  // namespace drot
