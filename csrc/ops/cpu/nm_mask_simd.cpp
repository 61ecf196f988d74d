#include "ops/cpu/nm_mask_simd.h"

#include "common/cpu/selection_lanes.h"

namespace drot::DROT_SIMD {

template <class Key>
void mask_lanes(const Key* key, int group, int prune, Key* removed) {
  removed_lanes<kMaskLanes>(key, group, prune, removed);
}

template void mask_lanes(const int32_t*, int, int, int32_t*);
template void mask_lanes(const int64_t*, int, int, int64_t*);

}  // namespace drot::DROT_SIMD
