// swiglu_rotate: y = (SiLU(gate) · up) R, with R = blockdiag(rotation[0], rotation[1], …), or without R.
//
// With ends (common/expert_ends.h) each expert of a mixture has a part of the rows, and an R of its own: an
// equal part of rotation.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "common/checks.h"
#include "common/expert_ends.h"
#include "ops/swiglu_rotate_math.h"

namespace drot {

// gate and up [..., n·b], rotation [n, b, b], all of one dtype and on one device. With ends [experts], gate
// and up [rows, n·b] and rotation [experts·n, b, b].
inline void check_swiglu_rotate(const at::Tensor& gate, const at::Tensor& up,
                                const std::optional<at::Tensor>& rotation,
                                const std::optional<at::Tensor>& ends) {
  check_dtype(gate, "gate", {at::kBFloat16, at::kHalf, at::kFloat});
  TORCH_CHECK_VALUE(gate.dim() >= 1, "gate must be [..., n], got ", gate.sizes());
  if (ends) {
    TORCH_CHECK_VALUE(rotation, "ends must come with a rotation, of which each expert has a part");
    TORCH_CHECK_VALUE(gate.dim() == 2, "gate must be [rows, n] with ends, got ", gate.sizes());
    check_expert_ends(*ends, ends->numel(), gate.size(0), gate, "gate");
  }
  if (rotation) {
    TORCH_CHECK_VALUE(rotation->dim() == 3 && rotation->size(1) == rotation->size(2),
                      "rotation must be [n, b, b], got ", rotation->sizes());
    const int64_t experts = ends ? std::max<int64_t>(1, ends->size(0)) : 1;
    TORCH_CHECK_VALUE(rotation->size(0) % experts == 0,
                      "rotation must have the same number of blocks for each of ", experts, " experts, got ",
                      rotation->size(0));
    const int64_t width = rotation->size(0) / experts * rotation->size(1);
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
