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

// (w_j - q_j) / U_jj; the choice comes before the division, so that neither backend branches.
template <class T>
DROT_HOST_DEVICE T sweep_error(T w, T diagonal, bool removed) {
  const T gone = removed ? w : T(0);
  return gone / diagonal;
}

// Takes an error e_j · U_jk from the weight of a column k > j; V is T or a vector of T.
template <class V, class T>
DROT_HOST_DEVICE void sweep_update(V& w, const V& error, const T& factor) {
  w -= error * factor;
}

}  // namespace drot
