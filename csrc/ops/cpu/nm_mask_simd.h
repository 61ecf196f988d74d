// The part of nm_mask that is compiled for each instruction set (common/simd.h).
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace drot {

// Groups that mask_lanes ranks side by side.
constexpr int kMaskLanes = 32;

}  // namespace drot

// key, removed: [group][kMaskLanes], Key = int32_t or int64_t; see removed_lanes.
DROT_SIMD_DECLARE(template <class Key> void mask_lanes(const Key* key, int group, int prune, Key* removed))
