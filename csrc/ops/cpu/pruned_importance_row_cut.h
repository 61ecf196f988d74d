// Selection of the `prune` smallest keys of a whole row, for the CPU kernel of pruned_importance.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace drot {

// Removed are all keys below `key`, and the keys equal to it in columns before ties_end.
template <class Key>
struct Cut {
  Key key;
  int64_t ties_end;
};

// The number of keys <= limit.
template <class Key>
DROT_HOST_DEVICE int64_t count_up_to(const Key* key, int64_t columns, Key limit) {
  constexpr int64_t kPart = 1 << 20;  // keys whose count fits in 32 bits
  int64_t count = 0;
  for (int64_t start = 0; start < columns; start += kPart) {
    const int64_t end = columns - start < kPart ? columns : start + kPart;
    Key part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = start; j < end; ++j) part += key[j] <= limit;
    count += part;
  }
  return count;
}

// Bisects the range of the keys until it holds one key, or until exactly `prune` keys are <= its middle:
// about 20 counts for a row of fp32, each at the speed of the cache, for any distribution of the keys.
template <class Key>
DROT_HOST_DEVICE Cut<Key> cut_of_row(const Key* key, int64_t columns, int64_t prune) {
  if (columns == 0 || prune == 0) return {Key(0), 0};
  Key low = key[0], high = key[0];
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t j = 0; j < columns; ++j) {
    low = key[j] < low ? key[j] : low;
    high = key[j] > high ? key[j] : high;
  }
  int64_t below = 0;  // keys below low
  // keys of scores are not negative: high - low does not overflow, nor middle + 1, as high is above middle
  while (low < high) {
    const Key middle = low + (high - low) / 2;
    const int64_t count = count_up_to(key, columns, middle);
    if (count == prune) return {middle + 1, 0};
    if (count < prune) {
      low = middle + 1;
      below = count;
    } else {
      high = middle;
    }
  }
  int64_t end = 0;
  for (int64_t ties = prune - below; ties > 0; ++end) ties -= key[end] == low;
  return {low, end};
}

}  // namespace drot
