// Transposition of neighbouring groups of a row, [group][column in group], to one group in each vector lane
// and back. Used by the CPU kernel of pruned_importance.
#pragma once

#include <type_traits>

#include "common/cpu/selection_lanes.h"

namespace drot::DROT_SIMD {

#ifdef __AVX2__
// Transposes 8 × 8 values. from(i) and to(i): the addresses of row i, 8 contiguous values.
template <class From, class To>
DROT_HOST_DEVICE void transpose_octets(const From& from, const To& to) {
  using Octet = Lanes<int32_t>::Vector;
  Octet a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = lanes_at(from(i));
  for (int i = 0; i < 8; i += 2) {
    b[i] = __builtin_shuffle(a[i], a[i + 1], Octet{0, 8, 1, 9, 4, 12, 5, 13});
    b[i + 1] = __builtin_shuffle(a[i], a[i + 1], Octet{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (int i = 0; i < 8; i += 4) {
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = __builtin_shuffle(b[i + k], b[i + k + 2], Octet{0, 1, 8, 9, 4, 5, 12, 13});
      a[i + 2 * k + 1] = __builtin_shuffle(b[i + k], b[i + k + 2], Octet{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shuffle(a[i], a[i + 4], Octet{0, 1, 2, 3, 8, 9, 10, 11});
    b[i + 4] = __builtin_shuffle(a[i], a[i + 4], Octet{4, 5, 6, 7, 12, 13, 14, 15});
  }
  for (int i = 0; i < 8; ++i) lanes_at(to(i)) = b[i];
}

// Calls f(column, lane) for every block of 8 × 8; column(i) and lane(i) are the offsets of its row i in the
// order of the columns and in the order of the lanes. A row holds several groups where a group is smaller
// than 8.
template <int kLanes, class F>
DROT_HOST_DEVICE void for_each_octets(int group, const F& f) {
  const int row = group < 8 ? 8 : group, lanes = 8 * row / group;
  for (int lane = 0; lane < kLanes; lane += lanes) {
    for (int start = 0; start < row; start += 8) {
      f([=](int i) { return lane * group + i * row + start; },
        [=](int i) {
          return group < 8 ? i % group * kLanes + lane + i / group * 8 : (start + i) * kLanes + lane;
        });
    }
  }
}

// Whether kLanes groups consist of whole blocks of 8 × 8.
DROT_HOST_DEVICE bool is_octets(int group) { return group % 8 == 0 || group == 4 || group == 2; }
#endif

// columns [kLanes][group] -> by_lane [group][kLanes]. The order of the lanes is undone by lanes_to_columns.
template <int kLanes, class Key>
DROT_HOST_DEVICE void columns_to_lanes(const Key* columns, int group, Key* by_lane) {
#ifdef __AVX2__
  if constexpr (std::is_same_v<Key, int32_t>) {
    if (is_octets(group)) {
      for_each_octets<kLanes>(group, [&](auto column, auto lane) {
        transpose_octets([&](int i) { return columns + column(i); },
                         [&](int i) { return by_lane + lane(i); });
      });
      return;
    }
  }
#endif
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < group; ++i) by_lane[i * kLanes + lane] = columns[lane * group + i];
  }
}

// The inverse of columns_to_lanes.
template <int kLanes, class Key>
DROT_HOST_DEVICE void lanes_to_columns(const Key* by_lane, int group, Key* columns) {
#ifdef __AVX2__
  if constexpr (std::is_same_v<Key, int32_t>) {
    if (is_octets(group)) {
      for_each_octets<kLanes>(group, [&](auto column, auto lane) {
        transpose_octets([&](int i) { return by_lane + lane(i); },
                         [&](int i) { return columns + column(i); });
      });
      return;
    }
  }
#endif
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < group; ++i) columns[lane * group + i] = by_lane[i * kLanes + lane];
  }
}

}  // namespace drot::DROT_SIMD
