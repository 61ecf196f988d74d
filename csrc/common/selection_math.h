// Which scores of a group are removed: the rule that every op, on every backend, shares.
//
// The `prune` smallest go; of equal scores the one with the lower index goes first; -0 equals 0, and
// NaN is larger than every number, so it goes last.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace drot {

// The largest group whose mask fits the bits that removed_bits returns.
constexpr int kMaxGroup = 32;

// A signed integer with the order of the rule above, so that a comparison is one instruction and
// needs no case for NaN.
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

// True where a key goes before another one of a higher index.
template <class Key>
DROT_HOST_DEVICE bool goes_before(Key earlier, Key later) {
  return earlier <= later;
}

// The mask of one group of kGroup scores, bit i set where score[i] is removed. Made for registers on the GPU:
// every loop is unrolled, and the ranks come from counting, without a branch.
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

// The same for any group of 1 to kMaxGroup scores.
template <class T>
DROT_HOST_DEVICE uint32_t removed_bits(const T* score, int group, int prune) {
  uint32_t bits = 0;
  for (int i = 0; i < group; ++i) {
    const OrderedKey<T> key = ordered_key(score[i]);
    int rank = 0;
    for (int j = 0; j < i; ++j) rank += goes_before(ordered_key(score[j]), key);
    for (int j = i + 1; j < group; ++j) rank += !goes_before(key, ordered_key(score[j]));
    bits |= static_cast<uint32_t>(rank < prune) << i;
  }
  return bits;
}

}  // namespace drot
