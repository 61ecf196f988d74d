// The parts of batched_qr that call, through ATen, LAPACK and BLAS on a CPU, cuSOLVER and cuBLAS on a GPU.
#include "ops/batched_qr.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/geqrf.h>
#include <ATen/ops/linalg_cholesky_ex.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/orgqr.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

namespace drot {

std::tuple<at::Tensor, at::Tensor> householder_qr(const at::Tensor& a) {
  auto [packed, tau] = at::geqrf(a);
  const at::Tensor diagonal = packed.diagonal(0, -2, -1);
  const at::Tensor sign = at::where(diagonal < 0, -1.0, 1.0).to(a.scalar_type());
  at::Tensor r = (packed.triu() * sign.unsqueeze(-1)).contiguous();
  at::Tensor q = (at::orgqr(packed, tau) * sign.unsqueeze(-2)).contiguous();
  return {q, r};
}

// aᵀa, of which only the lower triangle is valid: blocks of columns from the diagonal down are 5/8 of the
// whole product.
static at::Tensor lower_gram(const at::Tensor& a) {
  constexpr int64_t kBlocks = 4, kSmall = 512;
  const int64_t n = a.size(-1);
  if (n <= kSmall) {
    return at::matmul(a.mT(), a);
  }
  at::Tensor gram = at::zeros(a.sizes(), a.options());
  const int64_t width = (n + kBlocks - 1) / kBlocks;
  for (int64_t j = 0; j < n; j += width) {
    const int64_t columns = std::min(width, n - j);
    gram.narrow(-2, j, n - j)
        .narrow(-1, j, columns)
        .copy_(at::matmul(a.narrow(-1, j, n - j).mT(), a.narrow(-1, j, columns)));
  }
  return gram;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cholesky_qr(const at::Tensor& a) {
  check_batched_qr(a);
  if (a.numel() == 0)
    return {a.clone(), a.clone(), at::ones(a.sizes().slice(0, a.dim() - 2), a.options().dtype(at::kBool))};
  const at::Tensor wide = a.to(at::kDouble);
  const auto [lower, info] = at::linalg_cholesky_ex(lower_gram(wide));
  const at::Tensor r = lower.mT();
  const at::Tensor q = at::linalg_solve_triangular(r, wide, /*upper=*/true, /*left=*/false);
  // |qᵀq - 1| grows with the square of a's condition number, and Cholesky fails only when all digits are
  // lost. The product with four fixed, dense vectors measures it at the cost of a few matrix-vector products.
  const at::Tensor index = at::arange(a.size(-1), wide.options());
  const at::Tensor probes = at::cos(index.unsqueeze(-1) * at::arange(1, 5, wide.options()) * 1.7 + 0.3);
  const at::Tensor error = (at::matmul(q.mT(), at::matmul(q, probes)) - probes).abs().amax({-2, -1});
  const double tolerance = a.scalar_type() == at::kFloat ? 1e-7 : 1e-10;
  // a NaN is not reliable: it compares false
  const at::Tensor reliable = (error <= tolerance).logical_and(info == 0);
  return {q.to(a.scalar_type()).contiguous(), r.to(a.scalar_type()).contiguous(), reliable};
}

at::Tensor qr_backward(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r) {
  // ga = (gq + q C) r⁻ᵀ with M = -gqᵀ q and C = tril(M) + tril(M, -1)ᵀ
  const at::Tensor m = at::matmul(gq.mT(), q).neg();
  const at::Tensor c = m.tril() + m.tril(-1).mT();
  const at::Tensor right = gq + at::matmul(q, c);
  return at::linalg_solve_triangular(r.mT(), right, /*upper=*/false, /*left=*/false).contiguous();
}

TORCH_LIBRARY_IMPL(drot, CompositeExplicitAutograd, m) { m.impl("cholesky_qr", &cholesky_qr); }

}  // namespace drot
