// The kernel of nm_mask for groups, by one thread each, and its launch. tests/native compiles this file for a
// CPU too.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/selection_math.h"

namespace drot {

constexpr int kMaskThreads = 256;

// One thread per group. kGroup: the size of a group, or 0 if `group` gives the size at run time.
//
// Args:
//   score: [groups, size].
//   groups: number of groups.
//   group: the size if kGroup is 0.
//   prune: scores of a group that are removed.
//   removed: [groups, size].
template <class T, int kGroup>
__global__ void __launch_bounds__(kMaskThreads)
    mask_groups(const T* __restrict__ score, int64_t groups, int group, int prune,
                bool* __restrict__ removed) {
  using Math = at::opmath_type<T>;
  constexpr int kMost = kGroup ? kGroup : kMaxGroup;
  const int size = kGroup ? kGroup : group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMaskThreads;
  for (int64_t g = static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x; g < groups; g += step) {
    const T* from = score + g * size;
    bool* to = removed + g * size;
    Math s[kMost];
    // The array is filled up with NaN, which is removed last, after NaN of a lower index.
#pragma unroll
    for (int i = 0; i < kMost; ++i) s[i] = i < size ? static_cast<Math>(from[i]) : Math(NAN);
    const uint32_t bits = removed_bits(s, prune);
    if constexpr (kGroup % 4 == 0 && kGroup > 0) {
      // four flags per store: `removed` is a new tensor, so groups of 4 k bytes are aligned to 4 bytes
#pragma unroll
      for (int i = 0; i < kGroup; i += 4) {
        const uint32_t b = bits >> i;
        reinterpret_cast<uint32_t*>(to)[i / 4] = (b & 1u) | (b & 2u) << 7 | (b & 4u) << 14 | (b & 8u) << 21;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < size) to[i] = (bits >> i) & 1u;
      }
    }
  }
}

template <int kGroup, class T, class LauncherT>
void launch_mask_groups(LauncherT& launcher, const T* score, int64_t groups, int group, int prune,
                        bool* removed) {
  const int64_t wanted = (groups + kMaskThreads - 1) / kMaskThreads;
  const int64_t most = 32 * static_cast<int64_t>(launcher.multiprocessors());
  launcher.launch(mask_groups<T, kGroup>, dim3(static_cast<unsigned>(std::min(wanted, most))),
                  dim3(kMaskThreads), /*shared_bytes=*/0, score, groups, group, prune, removed);
}

// launcher: a Launcher (common/cuda/launcher.cuh). groups is at least 1, and removed is aligned to 4 bytes.
template <class T, class LauncherT>
void run_mask_groups(LauncherT& launcher, const T* score, int64_t groups, int group, int prune,
                     bool* removed) {
  switch (group) {
    case 2:
      return launch_mask_groups<2>(launcher, score, groups, group, prune, removed);
    case 4:
      return launch_mask_groups<4>(launcher, score, groups, group, prune, removed);
    case 8:
      return launch_mask_groups<8>(launcher, score, groups, group, prune, removed);
    case 16:
      return launch_mask_groups<16>(launcher, score, groups, group, prune, removed);
    default:
      return launch_mask_groups<0>(launcher, score, groups, group, prune, removed);
  }
}

}  // namespace drot
