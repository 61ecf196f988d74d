// The product of sparse24_linear on a CPU, for the ops that multiply packed weights.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace drot {

// The fewest products of weights and tokens for which another thread is used: about 10 us of work.
constexpr int64_t kGrain24 = int64_t(1) << 17;

// The arguments of one call, with all tokens in one dimension. x, residual and rotation may be
// non-contiguous. A rotation that lies by columns is multiplied as a linear is, which PyTorch does faster.
struct Sparse24Product {
  at::Tensor x, values, positions;
  at::Tensor bias, residual, rotation;  // may be undefined
  int64_t tokens, in, out;
};

// Writes it to the contiguous y [tokens, out].
void multiply24(const Sparse24Product& p, at::Tensor& y);

template <class V>
const V* data24(const at::Tensor& t) {
  return t.defined() ? static_cast<const V*>(t.const_data_ptr()) : nullptr;
}

// x [tokens, in] -> fp32 [tokens, padded24(in)].
at::Tensor widened24(const at::Tensor& x);

}  // namespace drot
