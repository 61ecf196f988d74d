// The kernels of pruned_importance, for groups of a row or for a given mask; used by pruned_importance.cu.
// One pass over y: no group needs a value of another group.
#pragma once

#include <ATen/OpMathType.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/column_scale.cuh"
#include "common/cuda/column_walk.cuh"
#include "common/cuda/reduce.cuh"
#include "common/score_math.h"
#include "common/selection_math.h"

namespace drot {

// The arguments of one call. All arrays are contiguous and on the GPU.
template <class T>
struct PrunedProblem {
  using Math = at::opmath_type<T>;
  const T* y;                // [rows, columns]
  const Math* column_scale;  // [columns], or null for ones
  const bool* removed;       // a given mask [rows, columns], with group = 1; else null
  int64_t rows, columns;
  int group, prune;     // the `prune` smallest scores of each `group` are removed
  double scale;         // factor of the loss
  T* dy;                // [rows, columns]
  Math* dcolumn_scale;  // [columns]; null if column_scale is null
  Math* loss;           // one value

  // Whether every row can be read and written 16 bytes at a time.
  bool vectorizable() const { return columns % kVectorSize<T> == 0 && is_aligned(y) && is_aligned(dy); }
};

// The terms of one element y with score s = y² · column_scale: in the loss (not yet times scale), in
// dcolumn_scale, and its dy.
template <class Math>
struct PrunedTerms {
  Math loss, dcolumn_scale, dy;

  __device__ PrunedTerms(Math y, Math column_scale, Math s, bool gone, Math scale)
      // s - s is 0 if s is finite, else NaN: the loss then is NaN even if s is not removed
      : loss((gone ? s : Math(0)) + (s - s)),
        dcolumn_scale(gone ? y * (y * scale) : Math(0)),
        dy(gone ? 2 * (y * column_scale) * scale : Math(0)) {}
};

// Columns of a thread: whole groups, at least 16 bytes.
template <class T, int kGroup>
constexpr int kPrunedOwned = kGroup > kVectorSize<T> ? kGroup : kVectorSize<T>;

// Rows that a warp loads at once: 64 bytes per thread.
template <class T, int kGroup>
constexpr int kPrunedRows = 64 / (kPrunedOwned<T, kGroup> * static_cast<int>(sizeof(T)));

// Blocks per multiprocessor, so at most 80 registers per thread, 128 for fp64.
template <class T>
constexpr int kPrunedResident = sizeof(T) == 8 ? 2 : 3;

template <int kN>
struct alignas(kN) Flags {
  bool flag[kN];
};

// The mask of kN neighbouring elements, bit i set if element i is removed. `at`: index of the first element
// in `removed`, a multiple of kN.
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

// For vectorizable rows and groups of 1, 2, 4 or 8: a thread ranks the scores of its groups in registers.
// dcolumn_scale_of_chunk [chunks, columns] and loss_of_block [chunks, tiles]: sums of each block.
template <class T, int kGroup, bool kScaled>
__global__ void __launch_bounds__(kWalkThreads, kPrunedResident<T>)
    pruned_groups(const PrunedProblem<T> a, int64_t chunk,
                  at::opmath_type<T>* __restrict__ dcolumn_scale_of_chunk,
                  double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  constexpr int kVec = kVectorSize<T>, kN = kPrunedOwned<T, kGroup>, kVectors = kN / kVec,
                kR = kPrunedRows<T, kGroup>;
  __shared__ double scratch[32];
  const ColumnWalk walk(32 * kN, kN, a.rows, chunk, kR);
  const bool inside = walk.start < a.columns;
  const Math scale = static_cast<Math>(a.scale);
  Math column_scale[kN], dcolumn_scale[kN];
  double loss = 0;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    column_scale[i] = kScaled && inside ? a.column_scale[walk.start + i] : Math(1);
    dcolumn_scale[i] = 0;
    if (kScaled) loss += nan_if_invalid_scale(column_scale[i]);
  }
  for (int64_t row = walk.first; row < walk.last; row += kWalkWarps * kR) {
    AlignedVector<T, kVec> y[kR][kVectors];
#pragma unroll
    for (int r = 0; r < kR; ++r) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        y[r][p] = load_aligned<T, kVec>(a.y + (row + r) * a.columns + walk.start + p * kVec,
                                        inside && row + r < walk.last);
      }
    }
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      if (!inside || row + r >= walk.last) break;
      const int64_t at = (row + r) * a.columns + walk.start;
      Math s[kN], sum = 0;
#pragma unroll
      for (int i = 0; i < kN; ++i)
        s[i] = score_of(static_cast<Math>(y[r][i / kVec].get(i % kVec)), column_scale[i]);
      const uint32_t bits = pruned_bits<kGroup>(s, a.removed, at, a.prune);
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        AlignedVector<T, kVec> out;
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          const int i = p * kVec + v;
          const PrunedTerms<Math> terms(static_cast<Math>(y[r][p].get(v)), column_scale[i], s[i],
                                        bits >> i & 1, scale);
          sum += terms.loss;
          if (kScaled) dcolumn_scale[i] += terms.dcolumn_scale;
          out.set(v, static_cast<T>(terms.dy));
        }
        store_global(a.dy + at + p * kVec, out);
      }
      loss += sum;
    }
  }
  loss = block_sum(loss, scratch);
  if (threadIdx.x == 0) loss_of_block[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = loss;
  if constexpr (kScaled) {
    __shared__ Math sums[kWalkWarps][kSlice][32];
    Math* out = dcolumn_scale_of_chunk + blockIdx.y * a.columns + walk.tile;
    sum_over_warps(dcolumn_scale, kN, sums, out, a.columns - walk.tile);
  }
}

constexpr int kLaneRows = 4;
constexpr int kLaneResident = 4;

// The same for groups of any size and any alignment: a lane has one column, a warp as many whole groups as
// fit into 32 lanes. A lane computes the rank of its score by shuffles with the other lanes of its group.
template <class T, bool kScaled>
__global__ void __launch_bounds__(kWalkThreads, kLaneResident)
    pruned_lanes(const PrunedProblem<T> a, int64_t chunk,
                 at::opmath_type<T>* __restrict__ dcolumn_scale_of_chunk,
                 double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  __shared__ double scratch[32];
  const int width = 32 / a.group * a.group, lane = threadIdx.x % 32;
  const int place = lane % a.group, first_of_group = lane - place;
  const ColumnWalk walk(width, 1, a.rows, chunk, kLaneRows);
  const bool inside = lane < width && walk.start < a.columns;
  const Math scale = static_cast<Math>(a.scale),
             column_scale = kScaled && inside ? a.column_scale[walk.start] : Math(1);
  Math dcolumn_scale[1] = {0};
  double loss = kScaled ? nan_if_invalid_scale(column_scale) : Math(0);
  for (int64_t row = walk.first; row < walk.last; row += kWalkWarps * kLaneRows) {
    Math y[kLaneRows];
    bool gone[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const bool here = inside && row + r < walk.last;
      const int64_t at = (row + r) * a.columns + walk.start;
      y[r] = here ? static_cast<Math>(a.y[at]) : Math(0);
      gone[r] = here && a.removed != nullptr && a.removed[at];
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const Math s = score_of(y[r], column_scale);
      if (a.removed == nullptr) {
        const OrderedKey<Math> key = ordered_key(s);
        int rank = 0;
        for (int i = 0; i < a.group; ++i) {
          // lanes beyond the last whole group take part in the shuffle; their rank is not used
          const OrderedKey<Math> other = __shfl_sync(0xffffffffu, key, (first_of_group + i) % 32);
          rank += i < place ? goes_before(other, key) : i > place && !goes_before(key, other);
        }
        gone[r] = rank < a.prune;
      }
      if (!inside || row + r >= walk.last) continue;
      const PrunedTerms<Math> terms(y[r], column_scale, s, gone[r], scale);
      loss += terms.loss;
      if (kScaled) dcolumn_scale[0] += terms.dcolumn_scale;
      a.dy[(row + r) * a.columns + walk.start] = static_cast<T>(terms.dy);
    }
  }
  loss = block_sum(loss, scratch);
  if (threadIdx.x == 0) loss_of_block[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = loss;
  if constexpr (kScaled) {
    __shared__ Math sums[kWalkWarps][kSlice][32];
    Math* out = dcolumn_scale_of_chunk + blockIdx.y * a.columns + walk.tile;
    const int64_t left = a.columns - walk.tile;
    sum_over_warps(dcolumn_scale, 1, sums, out, width < left ? width : left);
  }
}

// kGroup = 0: pruned_lanes.
template <class T, int kGroup, bool kScaled, class LauncherT>
void launch_pruned_groups(LauncherT& launcher, const PrunedProblem<T>& a) {
  using Math = at::opmath_type<T>;
  constexpr int kR = kGroup ? kPrunedRows<T, kGroup> : kLaneRows;
  const int width = kGroup ? 32 * kPrunedOwned<T, kGroup> : 32 / a.group * a.group;
  const ColumnGrid grid(a.rows, a.columns, width, kR,
                        (kGroup ? kPrunedResident<T> : kLaneResident) * launcher.multiprocessors());
  Math* dcolumn_scale = kScaled ? launcher.template allocate<Math>(grid.chunks * a.columns) : nullptr;
  double* loss = launcher.template allocate<double>(grid.chunks * grid.tiles);
  const auto start = [&](auto* kernel) {
    launcher.launch(kernel, dim3(grid.tiles, grid.chunks), dim3(kWalkThreads), 0, a, grid.chunk,
                    dcolumn_scale, loss);
  };
  if constexpr (kGroup == 0) {
    start(pruned_lanes<T, kScaled>);
  } else {
    start(pruned_groups<T, kGroup, kScaled>);
  }
  if (kScaled) {
    launch_sum_columns(launcher, static_cast<const Math*>(dcolumn_scale), grid.chunks, a.columns,
                       a.dcolumn_scale);
  }
  launch_sum_losses(launcher, static_cast<const double*>(loss), grid.chunks * grid.tiles, a.scale, a.loss);
}

template <class T, class LauncherT>
void run_pruned_importance(LauncherT& launcher, const PrunedProblem<T>& a) {
  const auto with_group = [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    return a.column_scale != nullptr ? launch_pruned_groups<T, kGroup, true>(launcher, a)
                                     : launch_pruned_groups<T, kGroup, false>(launcher, a);
  };
  switch (a.vectorizable() ? a.group : 0) {
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
