// rope: rotary position embedding. The first half x and the second half y of each head become
// x cos - y sin and y cos + x sin, with the halves of cos and sin.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "common/checks.h"
#include "ops/rope_math.h"

namespace drot {

// q [b, h, t, d] and k [b, g, t, d], cosine and sine [b, t, d] or [1, t, d], all of one dtype, on one device.
inline void check_rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cosine,
                       const at::Tensor& sine) {
  check_dtype(q, "q", {at::kBFloat16, at::kHalf, at::kFloat});
  TORCH_CHECK_VALUE(q.dim() == 4 && q.size(3) % 2 == 0, "q must be [b, h, t, d] with an even d, got ",
                    q.sizes());
  TORCH_CHECK_VALUE(
      k.dim() == 4 && k.size(0) == q.size(0) && k.size(2) == q.size(2) && k.size(3) == q.size(3),
      "k must be [b, g, t, d] with b, t and d of q, ", q.sizes(), ", got ", k.sizes());
  TORCH_CHECK_VALUE(cosine.dim() == 3 && (cosine.size(0) == q.size(0) || cosine.size(0) == 1) &&
                        cosine.size(1) == q.size(2) && cosine.size(2) == q.size(3),
                    "cos must be [b, t, d] or [1, t, d] of q, ", q.sizes(), ", got ", cosine.sizes());
  check_same_shape(sine, "sin", cosine, "cos");
  const auto alike = [&](const at::Tensor& t, const char* name) {
    check_same_dtype(t, name, q, "q");
    check_same_device(t, name, q, "q");
  };
  alike(k, "k");
  alike(cosine, "cos");
  alike(sine, "sin");
}

// t, or a copy of it, whose last dimension is contiguous.
inline at::Tensor rope_rows(const at::Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

// Uninitialised heads of the shape of `heads`, which lie in memory as [b, t, h, d].
inline at::Tensor rope_result(const at::Tensor& heads) {
  return at::empty({heads.size(0), heads.size(2), heads.size(1), heads.size(3)}, heads.options());
}

inline RopeStrides rope_strides(const at::Tensor& heads) {
  return {heads.stride(0), heads.stride(1), heads.stride(2)};
}

// Of cosine or sine, whose only row of the batch may stand for all.
inline RopeStrides rope_angle_strides(const at::Tensor& t) {
  return {t.size(0) == 1 ? 0 : t.stride(0), 0, t.stride(1)};
}

// The arguments are results of rope_rows, the last two of rope_result.
template <class T>
RopeProblem<T> rope_problem(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cosine,
                            const at::Tensor& sine, at::Tensor& q_out, at::Tensor& k_out) {
  return {.q = static_cast<const T*>(q.const_data_ptr()),
          .k = static_cast<const T*>(k.const_data_ptr()),
          .cosine = static_cast<const T*>(cosine.const_data_ptr()),
          .sine = static_cast<const T*>(sine.const_data_ptr()),
          .q_out = static_cast<T*>(q_out.mutable_data_ptr()),
          .k_out = static_cast<T*>(k_out.mutable_data_ptr()),
          .q_strides = rope_strides(q),
          .k_strides = rope_strides(k),
          .cosine_strides = rope_angle_strides(cosine),
          .sine_strides = rope_angle_strides(sine),
          .batch = q.size(0),
          .tokens = q.size(2),
          .q_heads = q.size(1),
          .k_heads = k.size(1),
          .half = q.size(3) / 2};
}

}  // namespace drot
