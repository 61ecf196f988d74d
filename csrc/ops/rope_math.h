// The arithmetic of rope, for its CPU and CUDA kernels.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace drot {

// A pair of numbers of a head, turned. The halves of a head may have other factors.
DROT_HOST_DEVICE float rope_first(float first, float second, float cosine, float sine) {
  return first * cosine - second * sine;
}
DROT_HOST_DEVICE float rope_second(float first, float second, float cosine, float sine) {
  return second * cosine + first * sine;
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
