#include "ops/batched_qr.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "common/no_autocast.h"
#include "ops/cpu/batched_qr_small.h"

namespace drot {
namespace {

template <typename T>
void small_qr_batch(const at::Tensor& a, at::Tensor& q, at::Tensor& r) {
  const int64_t n = a.size(-1), size = n * n;
  const int64_t ld = (n + kQrPad - 1) / kQrPad * kQrPad;
  at::parallel_for(0, a.size(0), 1, [&](int64_t begin, int64_t end) {
    // small_qr needs an alignment of 64 bytes, which tensors have
    const at::Tensor work = at::empty({(2 * ld + 1) * ld}, a.options());
    for (int64_t i = begin; i < end; ++i) {
      DROT_SIMD_CALL(small_qr)
      (a.const_data_ptr<T>() + i * size, q.mutable_data_ptr<T>() + i * size,
       r.mutable_data_ptr<T>() + i * size, work.mutable_data_ptr<T>(), static_cast<int>(n));
    }
  });
}

std::tuple<at::Tensor, at::Tensor> batched_qr_cpu(const at::Tensor& a) {
  check_batched_qr(a);
  if (a.numel() == 0) {
    return {at::empty(a.sizes(), a.options()), at::empty(a.sizes(), a.options())};
  }
  if (a.size(-1) > kSmallQr) {
    return householder_qr(a);
  }
  const at::Tensor batch = a.contiguous().view({-1, a.size(-1), a.size(-1)});
  at::Tensor q = at::empty(batch.sizes(), batch.options()), r = at::empty_like(q);
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "batched_qr", [&] { small_qr_batch<scalar_t>(batch, q, r); });
  return {q.view(a.sizes()), r.view(a.sizes())};
}

// m <- C = tril(M) + tril(M, -1)ᵀ with M = -m.
template <typename T>
void symmetrise(T* m, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    m[i * n + i] = -m[i * n + i];
    for (int64_t j = 0; j < i; ++j) {
      m[i * n + j] = m[j * n + i] = -m[i * n + j];
    }
  }
}

// qr_backward of small matrices: one thread a matrix for everything but the products.
template <typename T>
at::Tensor small_qr_backward(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r) {
  const int64_t n = q.size(-1), size = n * n, count = q.size(0);
  const at::Tensor c = at::bmm(gq.mT(), q).contiguous();
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      symmetrise(c.mutable_data_ptr<T>() + i * size, n);
    }
  });
  // (gq + q C)ᵀ, since C is symmetric
  const at::Tensor right = at::baddbmm(gq.mT(), c, q.mT()).contiguous();
  at::Tensor ga = at::empty(q.sizes(), q.options());
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      DROT_SIMD_CALL(small_solve)
      (r.const_data_ptr<T>() + i * size, right.mutable_data_ptr<T>() + i * size,
       ga.mutable_data_ptr<T>() + i * size, static_cast<int>(n));
    }
  });
  return ga;
}

at::Tensor batched_qr_backward_cpu(const at::Tensor& gq, const at::Tensor& q, const at::Tensor& r) {
  check_batched_qr_backward(gq, q, r);
  const NoAutocast no_autocast;
  if (q.numel() == 0) {
    return at::empty(q.sizes(), q.options());
  }
  const int64_t n = q.size(-1);
  if (n > kSmallQr) {
    return qr_backward(gq, q, r);
  }
  const auto batch = [&](const at::Tensor& t) { return t.contiguous().view({-1, n, n}); };
  at::Tensor ga;
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "batched_qr_backward",
                             [&] { ga = small_qr_backward<scalar_t>(batch(gq), batch(q), batch(r)); });
  return ga.view(q.sizes());
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) {
  m.impl("batched_qr", &batched_qr_cpu);
  m.impl("batched_qr_backward", &batched_qr_backward_cpu);
}

}  // namespace drot
