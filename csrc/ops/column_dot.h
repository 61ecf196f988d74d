// column_dot: the dot products of equal columns of two matrices.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/checks.h"

namespace drot {

// a, b [count, rows, columns] fp32.
inline void check_column_dot(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 3, "a must be [count, rows, columns], got ", a.sizes());
  check_dtype(a, "a", {at::kFloat});
  check_same_shape(b, "b", a, "a");
  check_same_dtype(b, "b", a, "a");
  check_same_device(b, "b", a, "a");
}

}  // namespace drot
