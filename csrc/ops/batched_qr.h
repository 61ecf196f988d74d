// batched_qr: a [..., n, n] fp32 or fp64 -> q, r of the same shape, a = q r, diag(r) >= 0.
// batched_qr_backward: the gradient of a loss in a, from its gradient in q.
// cholesky_qr: the same factors from one Cholesky factorisation of aᵀa in fp64.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/checks.h"

namespace drot {

// Up to this n one thread block, or one CPU thread, takes a matrix of a batch.
constexpr int64_t kSmallQr = 256;

inline void check_batched_qr(const at::Tensor& a) {
  check_square(a, "a");
  check_dtype(a, "a", {at::kFloat, at::kDouble});
}

inline void check_batched_qr_backward(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r) {
  check_square(q, "q");
  check_dtype(q, "q", {at::kFloat, at::kDouble});
  check_same_shape(gq, "gq", q, "q");
  check_same_shape(r, "r", q, "q");
  check_same_dtype(gq, "gq", q, "q");
  check_same_dtype(r, "r", q, "q");
  check_same_device(gq, "gq", q, "q");
  check_same_device(r, "r", q, "q");
}

// LAPACK's or cuSOLVER's geqrf and orgqr, with the signs fixed. a: [..., n, n], n > 0.
std::tuple<at::Tensor, at::Tensor> householder_qr(const at::Tensor& a);

// The third tensor, bool [...], tells which matrices are orthogonal to fp32 (fp64 input: to 1e-10).
std::tuple<at::Tensor, at::Tensor, at::Tensor> cholesky_qr(const at::Tensor& a);

// In products and a triangular solve of the library, for any n. Shapes have been checked.
at::Tensor qr_backward(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r);

}  // namespace drot
