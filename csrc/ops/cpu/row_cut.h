// Where the `prune` smallest keys of a whole row end.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace drot {

// The keys below `key` go, and those equal to it in the columns before ties_end.
template <class Key>
struct Cut {
  Key key;
  int64_t ties_end;
};

template <class Key>
DROT_HOST_DEVICE int64_t count_up_to(const Key* key, int64_t columns, Key limit) {
  constexpr int64_t kPart = 1 << 20;  // what a counter of 32 bits holds with room to spare
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

// Halves the range of the keys until one of them is left, or one has `prune` keys up to it: about 20
// counts of a row of fp32, each at the speed of the cache, whatever the keys are.
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
  // scores are not negative: no overflow; INT_MAX, of NaN, is the highest, and never the middle
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
