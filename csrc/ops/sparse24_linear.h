// sparse24_linear: y = x Wᵀ (+ bias) (+ residual, or + residual · rotation), W [out, in] packed by pack24.
//
// x [..., in], bias [out], residual [..., out] and rotation [out, out] have the dtype of values. compressed
// is the result of sparse24_compress for the same weight, or none.
//
// sparse24_compress: the compressed form of W for cuSPARSELt (uint8, opaque); empty where cuSPARSELt cannot
// be used.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/pack24.h"

namespace drot {

using OptionalTensor = std::optional<at::Tensor>;

// The shape of y.
inline std::vector<int64_t> sparse24_linear_sizes(const at::Tensor& x, int64_t out) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = out;
  return sizes;
}

// Whether positions ascend is not checked: unpack24 does that where a weight is loaded. If they do not
// ascend, the result is undefined, but no memory outside of the tensors is read.
inline void check_sparse24_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                  const OptionalTensor& bias, const OptionalTensor& residual,
                                  const OptionalTensor& rotation, const OptionalTensor& compressed) {
  check_unpack24(values, positions);
  const int64_t out = values.size(0), in = 2 * values.size(1);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == in, "x must be [..., ", in,
                    "], two columns for each of values, got ", x.sizes());
  const auto check = [&](const at::Tensor& t, const char* name) {
    check_same_dtype(t, name, values, "values");
    check_same_device(t, name, values, "values");
  };
  check(x, "x");
  if (bias) {
    check_vector(*bias, "bias", out, "row of values");
    check(*bias, "bias");
  }
  TORCH_CHECK_VALUE(residual || !rotation, "rotation must come with a residual, which it rotates");
  if (residual) {
    TORCH_CHECK_VALUE(residual->sizes() == sparse24_linear_sizes(x, out), "residual must be ",
                      at::IntArrayRef(sparse24_linear_sizes(x, out)), ", the shape of the result, got ",
                      residual->sizes());
    check(*residual, "residual");
  }
  if (rotation) {
    TORCH_CHECK_VALUE(rotation->dim() == 2 && rotation->size(0) == out && rotation->size(1) == out,
                      "rotation must be [", out, ", ", out, "], got ", rotation->sizes());
    check(*rotation, "rotation");
  }
  if (compressed) {
    check_dtype(*compressed, "compressed", {at::kByte});
    check_same_device(*compressed, "compressed", values, "values");
  }
}

}  // namespace drot
