// sparsegpt_sweep: one block of columns of SparseGPT (Frantar & Alistarh 2023, algorithm 1).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/checks.h"
#include "common/selection_math.h"

namespace drot {

// w [rows, columns], hinv [columns, columns], fp32 or fp64; removed bool [rows, columns], or none: then
// group, 1 … kMaxGroup, divides the columns. Or a batch of each: [batch, rows, columns] and so on.
inline void check_sparsegpt_sweep(const at::Tensor& w, const at::Tensor& hinv,
                                  const std::optional<at::Tensor>& removed, int64_t prune, int64_t group) {
  TORCH_CHECK_VALUE(w.dim() == 2 || w.dim() == 3, "w must be [rows, columns] or [batch, rows, columns], got ",
                    w.sizes());
  check_dtype(w, "w", {at::kFloat, at::kDouble});
  TORCH_CHECK_VALUE(hinv.dim() == w.dim(), "hinv must be a matrix for each of w, got ", hinv.sizes(),
                    " for w of ", w.sizes());
  TORCH_CHECK_VALUE(hinv.size(-2) == w.size(-1) && hinv.size(-1) == w.size(-1) &&
                        (w.dim() == 2 || hinv.size(0) == w.size(0)),
                    "hinv must be [", w.size(-1), ", ", w.size(-1),
                    "], a row and a column for each column of w, got ", hinv.sizes());
  check_same_dtype(hinv, "hinv", w, "w");
  check_same_device(hinv, "hinv", w, "w");
  if (removed.has_value()) {
    check_same_shape(*removed, "removed", w, "w");
    check_dtype(*removed, "removed", {at::kBool});
    check_same_device(*removed, "removed", w, "w");
    return;
  }
  TORCH_CHECK_VALUE(group > 0, "group must be 1 to ", kMaxGroup, " where no mask is given, got ", group);
  check_groups(prune, group, w.size(-1), kMaxGroup);
}

}  // namespace drot
