// entropy_loss: Σ of the entropies of the rows and/or the columns of s = y²·m, with its gradient.
#pragma once

#include "ops/scores.h"

namespace drot {

inline void check_entropy_loss(const at::Tensor& y, const std::optional<at::Tensor>& m, bool rows,
                               bool columns, double scale) {
  check_scores(y, m, scale);
  TORCH_CHECK_VALUE(rows || columns, "entropy_loss needs rows=True, columns=True or both, got neither");
}

}  // namespace drot
