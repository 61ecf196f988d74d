// The arithmetic of one weight in sparsegpt_sweep, for its CPU and CUDA kernels. U is the upper Cholesky
// factor Hinv.
#pragma once

#include "common/host_device.h"

namespace drot {

// (w_j / U_jj)², the score by which the mask is chosen.
template <class T>
DROT_HOST_DEVICE T sweep_score(T w, T diagonal) {
  const T scaled = w / diagonal;
  return scaled * scaled;
}

// error = w_j / U_jj where w_j is removed, else 0. The selection comes before the division, so that no
// backend branches. V is T and Mask bool, or V is a vector of T and Mask the result of a vector comparison.
template <class V, class T, class Mask>
DROT_HOST_DEVICE void sweep_error(V& error, const V& w, const T& diagonal, const Mask& removed) {
  const V gone = removed ? w : V{};
  error = gone / diagonal;
}

// Subtracts error · factor = e_j · U_jk from the weight of a column k > j. V is T or a vector of T.
template <class V, class T>
DROT_HOST_DEVICE void sweep_update(V& w, const V& error, const T& factor) {
  w -= error * factor;
}

}  // namespace drot
