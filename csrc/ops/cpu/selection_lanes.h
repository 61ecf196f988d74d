// The masks of many groups at once, one group a lane, in loops that the compiler vectorises.
#pragma once

#include "common/host_device.h"
#include "common/selection_math.h"

namespace drot {

// key, removed: [group][kLanes]; removed is 0 or 1, in integers of the key's width, which vector
// instructions select by. The ranks are counted as in removed_bits.
template <int kLanes, class Key>
DROT_HOST_DEVICE void removed_lanes(const Key* key, int group, int prune, Key* removed) {
  Key rank[kMaxGroup][kLanes];
  for (int j = 0; j < group; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) rank[j][lane] = 0;
    for (int i = 0; i < j; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const Key first = goes_before(key[i * kLanes + lane], key[j * kLanes + lane]);
        rank[j][lane] += first;
        rank[i][lane] += 1 - first;
      }
    }
  }
  for (int j = 0; j < group; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) removed[j * kLanes + lane] = rank[j][lane] < prune;
  }
}

}  // namespace drot
