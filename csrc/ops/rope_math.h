// The arithmetic of rope, for its CPU and CUDA kernels.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace drot {

// a b, which no compiler joins with a sum: rope has the bits of a product, a product and a sum of torch. For
// a CPU, CMakeLists.txt says so.
DROT_HOST_DEVICE float rope_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// A pair of numbers of a head, turned. The halves of a head may have other factors. `rounded` rounds a float
// to the dtype of the heads, and returns it as a float.
template <class Rounded>
DROT_HOST_DEVICE float rope_first(float first, float second, float cosine, float sine, Rounded rounded) {
  return rounded(rope_product(first, cosine)) - rounded(rope_product(second, sine));
}
template <class Rounded>
DROT_HOST_DEVICE float rope_second(float first, float second, float cosine, float sine, Rounded rounded) {
  return rounded(rope_product(second, cosine)) + rounded(rope_product(first, sine));
}

// Heads [batch, heads, tokens, 2 half]: the distances of the first three dimensions.
struct RopeStrides {
  int64_t batch, head, token;
};

// q, k: heads of queries and of keys; cosine, sine: [batch, tokens, 2 half], with no distance of heads.
// q_out, k_out: [batch, tokens, heads, 2 half].
template <class T>
struct RopeProblem {
  const T *q, *k, *cosine, *sine;
  T *q_out, *k_out;
  RopeStrides q_strides, k_strides, cosine_strides, sine_strides;
  int64_t batch, tokens, q_heads, k_heads, half;
};

}  // namespace drot
