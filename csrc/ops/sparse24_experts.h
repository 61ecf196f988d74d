// sparse24_experts: y = x Wₑᵀ (+ bₑ) for the rows of x that each expert e of a mixture has, with the 2:4
// weights of all experts packed by pack24.
//
// x [rows, in], values [experts, out, in/2], positions [experts, out, in/8], ends [experts]
// (common/expert_ends.h), bias [experts, out] -> y [rows, out].
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/checks.h"
#include "common/expert_ends.h"

namespace drot {

// Whether positions ascend is not checked: unpack24 does that where a weight is loaded.
inline void check_sparse24_experts(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                   const at::Tensor& ends, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(values.dim() == 3 && values.size(2) % 4 == 0,
                    "values must be [experts, out, in/2] with a multiple of 8 inputs, got ", values.sizes());
  check_dtype(values, "values", {at::kBFloat16, at::kHalf, at::kFloat});
  const int64_t experts = values.size(0), out = values.size(1), in = 2 * values.size(2);
  TORCH_CHECK_VALUE(positions.dim() == 3 && positions.size(0) == experts && positions.size(1) == out &&
                        positions.size(2) == in / 8,
                    "positions must be [", experts, ", ", out, ", ", in / 8, "], got ", positions.sizes());
  check_dtype(positions, "positions", {at::kByte});
  check_same_device(positions, "positions", values, "values");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == in, "x must be [rows, ", in,
                    "], two columns for each of values, got ", x.sizes());
  check_same_dtype(x, "x", values, "values");
  check_same_device(x, "x", values, "values");
  check_expert_ends(ends, experts, x.size(0), x, "x");
  if (bias) {
    TORCH_CHECK_VALUE(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == out, "bias must be [",
                      experts, ", ", out, "], got ", bias->sizes());
    check_same_dtype(*bias, "bias", values, "values");
    check_same_device(*bias, "bias", values, "values");
  }
}

}  // namespace drot
