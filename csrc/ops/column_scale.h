// column_scale: the column scales of a product U R, and column_scale_backward, the way back to R.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "common/checks.h"
#include "ops/column_scale_math.h"

namespace drot {

// product [count, rows, n] bf16.
inline void check_column_scale(const at::Tensor& product) {
  TORCH_CHECK_VALUE(product.dim() == 3, "product must be [count, rows, n], got ", product.sizes());
  check_dtype(product, "product", {at::kBFloat16});
}

// product as above; value and gradient [count, n] fp32, on its device.
inline void check_column_scale_backward(const at::Tensor& product, const at::Tensor& value,
                                        const at::Tensor& gradient) {
  check_column_scale(product);
  for (const auto& [t, name] : {std::pair(&value, "value"), std::pair(&gradient, "gradient")}) {
    TORCH_CHECK_VALUE(t->dim() == 2 && t->size(0) == product.size(0) && t->size(1) == product.size(2), name,
                      " must be [", product.size(0), ", ", product.size(2),
                      "], one value for each column of product, got ", t->sizes());
    check_dtype(*t, name, {at::kFloat});
    check_same_device(*t, name, product, "product");
  }
}

}  // namespace drot
