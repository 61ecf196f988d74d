// The arithmetic of one weight in sparsegpt_sweep, shared by both backends.
#pragma once

#include "common/host_device.h"

namespace drot {

// (w / U_jj)², by which n:m is chosen.
template <class T>
DROT_HOST_DEVICE T sweep_score(T w, T diagonal) {
  const T scaled = w / diagonal;
  return scaled * scaled;
}

// error = (w_j - q_j) / U_jj. The choice comes before the division, so that neither backend branches.
// V is T with a bool, or a vector of T with the mask of a vector comparison.
template <class V, class T, class Mask>
DROT_HOST_DEVICE void sweep_error(V& error, const V& w, const T& diagonal, const Mask& removed) {
  const V gone = removed ? w : V{};
  error = gone / diagonal;
}

// Takes an error e_j · U_jk from the weight of a column k > j; V is T or a vector of T.
template <class V, class T>
DROT_HOST_DEVICE void sweep_update(V& w, const V& error, const T& factor) {
  w -= error * factor;
}

}  // namespace drot
