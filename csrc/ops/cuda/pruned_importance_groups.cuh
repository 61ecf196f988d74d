// pruned_importance of groups of a row, or of a mask that is given: one pass, local to the group.
#pragma once

#include <ATen/OpMathType.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/score_math.h"
#include "common/selection_math.h"
#include "ops/cuda/column_walk.cuh"
#include "ops/cuda/pack.cuh"
#include "ops/cuda/reduce.cuh"

namespace drot {

// What one call works on; everything is contiguous and on the device.
template <class T>
struct PrunedProblem {
  using Math = at::opmath_type<T>;
  const T* y;           // [rows, columns]
  const Math* m;        // [columns], or null for ones
  const bool* removed;  // [rows, columns] where the mask is given, then group is 1; else null
  int64_t rows, columns;
  int group, prune;
  double scale;
  T* dy;
  Math* dm;    // [columns], or null where m is
  Math* loss;  // one value

  // Whether every row can be moved 16 bytes at a time.
  bool wide() const { return columns % kWide<T> == 0 && aligned(y) && aligned(dy); }
};

// What one weight adds: to the loss, and to dm where there is one; its dy.
template <class Math>
struct PrunedTerms {
  Math loss, dm, dy;

  __device__ PrunedTerms(Math w, Math m, Math s, bool gone, Math scale)
      // s - s is 0 where s is finite and NaN elsewhere, which tells the loss what the mask may hide
      : loss((gone ? s : Math(0)) + (s - s)),
        dm(gone ? w * (w * scale) : Math(0)),
        dy(gone ? 2 * (w * m) * scale : Math(0)) {}
};

// Columns of a thread: whole groups, of 16 bytes at least.
template <class T, int kGroup>
constexpr int kPrunedOwned = kGroup > kWide<T> ? kGroup : kWide<T>;

// Rows of a warp that are on their way together: 64 bytes a thread.
template <class T, int kGroup>
constexpr int kPrunedRows = 64 / (kPrunedOwned<T, kGroup> * static_cast<int>(sizeof(T)));

// Blocks of a multiprocessor: 80 registers a thread, 128 for fp64.
template <class T>
constexpr int kPrunedResident = sizeof(T) == 8 ? 2 : 3;

template <int kN>
struct alignas(kN) Flags {
  bool flag[kN];
};

// The mask of the kN columns at `at`, bit i set where column i is removed. `at` is a multiple of kN.
template <int kGroup, int kN, class Math>
__device__ uint32_t pruned_bits(const Math (&s)[kN], const bool* removed, int64_t at, int prune) {
  uint32_t bits = 0;
  if constexpr (kGroup == 1) {
    Flags<kN> gone;
#pragma unroll
    for (int i = 0; i < kN; ++i) gone.flag[i] = prune > 0;
    if (removed != nullptr) gone = *reinterpret_cast<const Flags<kN>*>(removed + at);
#pragma unroll
    for (int i = 0; i < kN; ++i) bits |= static_cast<uint32_t>(gone.flag[i]) << i;
  } else {
#pragma unroll
    for (int g = 0; g < kN; g += kGroup) {
      Math of_group[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) of_group[i] = s[g + i];
      bits |= removed_bits(of_group, prune) << g;
    }
  }
  return bits;
}

// dm [chunks, columns] and loss [chunks, tiles]: the sums of each block. A thread ranks its groups in
// registers.
template <class T, int kGroup, bool kFactor>
__global__ void __launch_bounds__(kWalkThreads, kPrunedResident<T>)
    pruned_groups(const PrunedProblem<T> a, int64_t chunk, at::opmath_type<T>* __restrict__ dm_of_chunk,
                  double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  constexpr int kVec = kWide<T>, kN = kPrunedOwned<T, kGroup>, kPacks = kN / kVec,
                kR = kPrunedRows<T, kGroup>;
  __shared__ double scratch[32];
  const ColumnWalk walk(32 * kN, kN, a.rows, chunk, kR);
  const bool inside = walk.start < a.columns;
  const Math scale = static_cast<Math>(a.scale);
  Math m[kN], dm[kN];
  double loss = 0;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    m[i] = kFactor && inside ? a.m[walk.start + i] : Math(1);
    dm[i] = 0;
    if (kFactor) loss += report_factor(m[i]);
  }
  for (int64_t row = walk.first; row < walk.last; row += kWalkWarps * kR) {
    Pack<T, kVec> y[kR][kPacks];
#pragma unroll
    for (int r = 0; r < kR; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        y[r][p] = load_pack<T, kVec>(a.y + (row + r) * a.columns + walk.start + p * kVec,
                                     inside && row + r < walk.last);
      }
    }
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      if (!inside || row + r >= walk.last) break;
      const int64_t at = (row + r) * a.columns + walk.start;
      Math s[kN], sum = 0;
#pragma unroll
      for (int i = 0; i < kN; ++i) s[i] = score_of(static_cast<Math>(y[r][i / kVec].get(i % kVec)), m[i]);
      const uint32_t bits = pruned_bits<kGroup>(s, a.removed, at, a.prune);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        Pack<T, kVec> out;
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          const int i = p * kVec + v;
          const PrunedTerms<Math> terms(static_cast<Math>(y[r][p].get(v)), m[i], s[i], bits >> i & 1, scale);
          sum += terms.loss;
          if (kFactor) dm[i] += terms.dm;
          out.set(v, static_cast<T>(terms.dy));
        }
        *reinterpret_cast<Pack<T, kVec>*>(a.dy + at + p * kVec) = out;
      }
      loss += sum;
    }
  }
  loss = block_sum(loss, scratch);
  if (threadIdx.x == 0) loss_of_block[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = loss;
  if constexpr (kFactor) {
    __shared__ Math sums[kWalkWarps][kSlice][32];
    Math* out = dm_of_chunk + blockIdx.y * a.columns + walk.tile;
    sum_over_warps(dm, kN, sums, out, a.columns - walk.tile);
  }
}

constexpr int kLaneRows = 4;
constexpr int kLaneResident = 4;

// The same for a group of any size and any alignment: a lane has one column, and a warp as many whole groups
// as it can; a lane finds its rank by looking at the others of its group.
template <class T, bool kFactor>
__global__ void __launch_bounds__(kWalkThreads, kLaneResident)
    pruned_lanes(const PrunedProblem<T> a, int64_t chunk, at::opmath_type<T>* __restrict__ dm_of_chunk,
                 double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  __shared__ double scratch[32];
  const int width = 32 / a.group * a.group, lane = threadIdx.x % 32;
  const int place = lane % a.group, first_of_group = lane - place;
  const ColumnWalk walk(width, 1, a.rows, chunk, kLaneRows);
  const bool inside = lane < width && walk.start < a.columns;
  const Math scale = static_cast<Math>(a.scale), m = kFactor && inside ? a.m[walk.start] : Math(1);
  Math dm[1] = {0};
  double loss = kFactor ? report_factor(m) : Math(0);
  for (int64_t row = walk.first; row < walk.last; row += kWalkWarps * kLaneRows) {
    Math w[kLaneRows];
    bool gone[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const bool here = inside && row + r < walk.last;
      const int64_t at = (row + r) * a.columns + walk.start;
      w[r] = here ? static_cast<Math>(a.y[at]) : Math(0);
      gone[r] = here && a.removed != nullptr && a.removed[at];
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const Math s = score_of(w[r], m);
      if (a.removed == nullptr) {
        const OrderedKey<Math> key = ordered_key(s);
        int rank = 0;
        for (int i = 0; i < a.group; ++i) {
          // lanes that no whole group has left look at each other, to no avail
          const OrderedKey<Math> other = __shfl_sync(0xffffffffu, key, (first_of_group + i) % 32);
          rank += i < place ? goes_before(other, key) : i > place && !goes_before(key, other);
        }
        gone[r] = rank < a.prune;
      }
      if (!inside || row + r >= walk.last) continue;
      const PrunedTerms<Math> terms(w[r], m, s, gone[r], scale);
      loss += terms.loss;
      if (kFactor) dm[0] += terms.dm;
      a.dy[(row + r) * a.columns + walk.start] = static_cast<T>(terms.dy);
    }
  }
  loss = block_sum(loss, scratch);
  if (threadIdx.x == 0) loss_of_block[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = loss;
  if constexpr (kFactor) {
    __shared__ Math sums[kWalkWarps][kSlice][32];
    Math* out = dm_of_chunk + blockIdx.y * a.columns + walk.tile;
    const int64_t left = a.columns - walk.tile;
    sum_over_warps(dm, 1, sums, out, width < left ? width : left);
  }
}

// kGroup 0 stands for pruned_lanes.
template <class T, int kGroup, bool kFactor, class Gpu>
void launch_pruned_groups(Gpu& gpu, const PrunedProblem<T>& a) {
  using Math = at::opmath_type<T>;
  constexpr int kR = kGroup ? kPrunedRows<T, kGroup> : kLaneRows;
  const int width = kGroup ? 32 * kPrunedOwned<T, kGroup> : 32 / a.group * a.group;
  const ColumnGrid grid(a.rows, a.columns, width, kR,
                        (kGroup ? kPrunedResident<T> : kLaneResident) * gpu.processors());
  Math* dm = kFactor ? gpu.template room<Math>(grid.chunks * a.columns) : nullptr;
  double* loss = gpu.template room<double>(grid.chunks * grid.tiles);
  const auto start = [&](auto* kernel) {
    gpu.launch(kernel, dim3(grid.tiles, grid.chunks), dim3(kWalkThreads), 0, a, grid.chunk, dm, loss);
  };
  if constexpr (kGroup == 0) {
    start(pruned_lanes<T, kFactor>);
  } else {
    start(pruned_groups<T, kGroup, kFactor>);
  }
  if (kFactor) launch_sum_columns(gpu, static_cast<const Math*>(dm), grid.chunks, a.columns, a.dm);
  launch_sum_losses(gpu, static_cast<const double*>(loss), grid.chunks * grid.tiles, a.scale, a.loss);
}

template <class T, class Gpu>
void run_pruned_importance(Gpu& gpu, const PrunedProblem<T>& a) {
  const auto with_group = [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    return a.m != nullptr ? launch_pruned_groups<T, kGroup, true>(gpu, a)
                          : launch_pruned_groups<T, kGroup, false>(gpu, a);
  };
  switch (a.wide() ? a.group : 0) {
    case 1:
      return with_group(std::integral_constant<int, 1>{});
    case 2:
      return with_group(std::integral_constant<int, 2>{});
    case 4:
      return with_group(std::integral_constant<int, 4>{});
    case 8:
      return with_group(std::integral_constant<int, 8>{});
    default:
      return with_group(std::integral_constant<int, 0>{});
  }
}

}  // namespace drot
