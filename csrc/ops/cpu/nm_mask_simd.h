// The part of the CPU kernel of nm_mask that is compiled for each instruction set (common/cpu/simd.h).
#pragma once

#include <cstdint>

#include "common/cpu/simd.h"

namespace drot {

// Groups of a tile, which mask_lanes ranks together.
constexpr int kMaskLanes = 32;

}  // namespace drot

// key, removed: [group][kMaskLanes], Key = int32_t or int64_t; see removed_lanes in
// common/cpu/selection_lanes.h.
DROT_SIMD_DECLARE(template <class Key> void mask_lanes(const Key* key, int group, int prune, Key* removed))
