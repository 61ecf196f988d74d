// batched_qr: a [..., n, n], fp32 or fp64 -> q, r of the same shape with a = q r, diag(r) >= 0.
// batched_qr_backward: gradient of a loss in q -> gradient in a.
// cholesky_qr: q, r from a Cholesky factorisation of aᵀa in fp64.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/checks.h"

namespace drot {

// Up to this n each matrix of a batch is factorised by one thread block, or by one CPU thread.
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

// geqrf and orgqr of LAPACK or cuSOLVER, with signs changed so that diag(r) >= 0. a: [..., n, n], n > 0.
std::tuple<at::Tensor, at::Tensor> householder_qr(const at::Tensor& a);

// Returns q, r and reliable, bool [...]: whether q is orthogonal to fp32 accuracy (for fp64 input: to 1e-10).
std::tuple<at::Tensor, at::Tensor, at::Tensor> cholesky_qr(const at::Tensor& a);

// batched_qr_backward for any n, by matrix products and a triangular solve of ATen. The caller checks shapes.
at::Tensor qr_backward(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r);

}  // namespace drot
