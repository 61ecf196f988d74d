// The masks of many groups at once, one group in each vector lane. Used by the DROT_SIMD_SOURCES of nm_mask,
// pruned_importance and sparsegpt_sweep.
#pragma once

#include "common/host_device.h"
#include "common/selection_math.h"

namespace drot::DROT_SIMD {

// Bytes of a vector register.
#ifdef __AVX2__
constexpr int kLaneBytes = 32;
#else
constexpr int kLaneBytes = 16;
#endif

// Vector: a register of T. Unaligned: a Vector in memory at any address. GCC makes two moves of 16 bytes of a
// memcpy instead, and a load that follows two narrower stores has to wait for them.
template <class T>
struct Lanes {
  typedef T Vector __attribute__((vector_size(kLaneBytes)));
  typedef T Unaligned __attribute__((vector_size(kLaneBytes), aligned(sizeof(T)), may_alias));
  static constexpr int kWidth = sizeof(Vector) / sizeof(T);
};

template <class T>
DROT_HOST_DEVICE const typename Lanes<T>::Unaligned& lanes_at(const T* p) {
  return *reinterpret_cast<const typename Lanes<T>::Unaligned*>(p);
}

template <class T>
DROT_HOST_DEVICE typename Lanes<T>::Unaligned& lanes_at(T* p) {
  return *reinterpret_cast<typename Lanes<T>::Unaligned*>(p);
}

// key, removed: [group][kLanes]. removed is 0 or 1, an integer of the key's width because vector selections
// need masks of that width. The ranks are counted as in removed_bits. With explicit vectors the compiler
// keeps the ranks of a small group of known size in registers.
template <int kLanes, class Key>
DROT_HOST_DEVICE void removed_lanes(const Key* key, int group, int prune, Key* removed) {
  using Vector = typename Lanes<Key>::Vector;
  constexpr int kWidth = Lanes<Key>::kWidth;
  static_assert(kLanes % kWidth == 0, "whole vectors");
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    Vector in[kMaxGroup], rank[kMaxGroup];
    for (int j = 0; j < group; ++j) {
      in[j] = lanes_at(key + j * kLanes + lane);
      Vector mine = in[j] - in[j];
      for (int i = 0; i < j; ++i) {
        const Vector first = in[i] <= in[j];  // goes_before, as -1 or 0
        mine -= first;
        rank[i] += first + 1;
      }
      rank[j] = mine;
    }
    for (int j = 0; j < group; ++j) {
      lanes_at(removed + j * kLanes + lane) = (rank[j] < Key(prune)) & 1;
    }
  }
}

}  // namespace drot::DROT_SIMD
