// skew_momentum: the skew-symmetric part of a product, added to a momentum, and Nesterov's sum of both or
// Adam's ratio.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "common/checks.h"

namespace drot {

// Side of a tile. The kernel reads a tile of the product and its mirror image together.
constexpr int64_t kSkewTile = 32;

// product, momentum [..., n, n] bf16; the momentum is contiguous, because it is written in place.
inline void check_skew_momentum(const at::Tensor& product, const at::Tensor& momentum, double decay,
                                std::optional<double> square_decay) {
  check_square(product, "product");
  check_dtype(product, "product", {at::kBFloat16});
  check_same_shape(momentum, "momentum", product, "product");
  check_same_dtype(momentum, "momentum", product, "product");
  check_same_device(momentum, "momentum", product, "product");
  TORCH_CHECK_VALUE(momentum.is_contiguous(), "momentum must be contiguous, got strides ",
                    momentum.strides());
  TORCH_CHECK_VALUE(std::isfinite(decay), "decay must be finite, got ", decay);
  TORCH_CHECK_VALUE(!square_decay || (*square_decay >= 0 && *square_decay <= 1),
                    "square_decay must be between 0 and 1, got ", *square_decay);
}

// Number of tiles in a row of tiles.
inline int64_t skew_tiles(int64_t n) { return (n + kSkewTile - 1) / kSkewTile; }

}  // namespace drot
