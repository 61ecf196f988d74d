// The rule by which scores of a group are removed, for the CPU and the CUDA kernels of nm_mask,
// pruned_importance and sparsegpt_sweep.
//
// The `prune` smallest scores are removed. If scores are equal, the lowest index is removed first.
// -0 equals 0, and NaN is larger than every number.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace drot {

// The largest group whose mask fits the 32 bits that removed_bits returns.
constexpr int kMaxGroup = 32;

// A signed integer that is ordered as the rule above orders scores: a comparison is then one instruction,
// without a case for NaN.
DROT_HOST_DEVICE int32_t ordered_key(float score) {
  const float x = score + 0.0f;  // turns -0 into 0
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int32_t key = bits ^ ((bits >> 31) & INT32_MAX);
  return x != x ? INT32_MAX : key;
}

DROT_HOST_DEVICE int64_t ordered_key(double score) {
  const double x = score + 0.0;
  int64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int64_t key = bits ^ ((bits >> 63) & INT64_MAX);
  return x != x ? INT64_MAX : key;
}

template <class T>
using OrderedKey = decltype(ordered_key(T{}));

// Whether `earlier` is removed before `later`, whose index is higher.
template <class Key>
DROT_HOST_DEVICE bool goes_before(Key earlier, Key later) {
  return earlier <= later;
}

// The mask of one group of kGroup scores: bit i is set where score[i] is removed. On the GPU all arrays stay
// in registers, because every loop is unrolled. The ranks are counted without a branch.
template <int kGroup, class T>
DROT_HOST_DEVICE uint32_t removed_bits(const T (&score)[kGroup], int prune) {
  static_assert(kGroup <= kMaxGroup, "the mask is 32 bits");
  OrderedKey<T> key[kGroup];
  int rank[kGroup];
  uint32_t bits = 0;
  DROT_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    key[i] = ordered_key(score[i]);
    rank[i] = 0;
  }
  DROT_UNROLL
  for (int j = 1; j < kGroup; ++j) {
    DROT_UNROLL
    for (int i = 0; i < j; ++i) {
      const bool first = goes_before(key[i], key[j]);
      rank[j] += first;
      rank[i] += !first;
    }
  }
  DROT_UNROLL
  for (int i = 0; i < kGroup; ++i) bits |= static_cast<uint32_t>(rank[i] < prune) << i;
  return bits;
}

}  // namespace drot
