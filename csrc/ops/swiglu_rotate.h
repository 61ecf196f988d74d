// swiglu_rotate: y = (SiLU(gate) · up) R, with R = blockdiag(rotation[0], rotation[1], …).
#pragma once

#include <ATen/core/Tensor.h>

#include "common/checks.h"
#include "ops/swiglu_rotate_math.h"

namespace drot {

// gate and up [..., n·b], rotation [n, b, b], all of one dtype and on one device.
inline void check_swiglu_rotate(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& rotation) {
  TORCH_CHECK_VALUE(rotation.dim() == 3 && rotation.size(1) == rotation.size(2),
                    "rotation must be [n, b, b], got ", rotation.sizes());
  check_dtype(rotation, "rotation", {at::kBFloat16, at::kHalf, at::kFloat});
  const int64_t width = rotation.size(0) * rotation.size(1);
  TORCH_CHECK_VALUE(gate.dim() >= 1 && gate.size(-1) == width, "gate must be [..., ", width,
                    "], one column for each row of rotation, got ", gate.sizes());
  check_same_shape(up, "up", gate, "gate");
  for (const auto& [t, name] : {std::pair(&gate, "gate"), std::pair(&up, "up")}) {
    check_same_dtype(*t, name, rotation, "rotation");
    check_same_device(*t, name, rotation, "rotation");
  }
}

// gate or up as [tokens, columns] whose columns are neighbours in memory: a view if it can be.
inline at::Tensor swiglu_rows(const at::Tensor& t) {
  const at::Tensor rows = t.size(-1) == 0 ? t.new_empty({0, 0}) : t.reshape({-1, t.size(-1)});
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

}  // namespace drot
