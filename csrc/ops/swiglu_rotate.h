// swiglu_rotate: y = (SiLU(gate) · up) R, with R = blockdiag(rotation[0], rotation[1], …), or without R.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/checks.h"
#include "ops/swiglu_rotate_math.h"

namespace drot {

// gate and up [..., n·b], rotation [n, b, b], all of one dtype and on one device.
inline void check_swiglu_rotate(const at::Tensor& gate, const at::Tensor& up,
                                const std::optional<at::Tensor>& rotation) {
  check_dtype(gate, "gate", {at::kBFloat16, at::kHalf, at::kFloat});
  TORCH_CHECK_VALUE(gate.dim() >= 1, "gate must be [..., n], got ", gate.sizes());
  if (rotation) {
    TORCH_CHECK_VALUE(rotation->dim() == 3 && rotation->size(1) == rotation->size(2),
                      "rotation must be [n, b, b], got ", rotation->sizes());
    const int64_t width = rotation->size(0) * rotation->size(1);
    TORCH_CHECK_VALUE(gate.size(-1) == width, "gate must be [..., ", width,
                      "], one column for each row of rotation, got ", gate.sizes());
    check_same_dtype(*rotation, "rotation", gate, "gate");
    check_same_device(*rotation, "rotation", gate, "gate");
  }
  check_same_shape(up, "up", gate, "gate");
  check_same_dtype(up, "up", gate, "gate");
  check_same_device(up, "up", gate, "gate");
}

// gate or up as [tokens, columns] whose columns are neighbours in memory: a view if it can be.
inline at::Tensor swiglu_rows(const at::Tensor& t) {
  const at::Tensor rows = t.size(-1) == 0 ? t.new_empty({0, 0}) : t.reshape({-1, t.size(-1)});
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

}  // namespace drot
