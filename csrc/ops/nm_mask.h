// nm_mask: the mask of the scores that are removed, n:m or the smallest of each row.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/checks.h"
#include "common/selection_math.h"

namespace drot {

// score [rows, columns], any float dtype; group 1 … kMaxGroup, or 0 for the whole row.
inline void check_nm_mask(const at::Tensor& score, int64_t prune, int64_t group) {
  check_matrix(score, "score");
  check_dtype(score, "score", {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16});
  check_groups(prune, group, score.size(1), kMaxGroup);
}

}  // namespace drot
