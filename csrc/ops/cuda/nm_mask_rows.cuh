// The kernel of nm_mask for whole rows, by radix selection, and its launch. tests/native compiles this file
// for a CPU too.
#pragma once

#include <ATen/OpMathType.h>

#include <cstdint>
#include <type_traits>

#include "common/selection_math.h"

namespace drot {

constexpr int kMaskRowThreads = 1024;
constexpr int kMaskDigits = 256;             // values of a digit: a pass of the radix selection takes 8 bits
constexpr int64_t kWidestMaskRow = 1 << 16;  // columns that the radix selection takes

// The key as an unsigned number of the same order; the radix selection takes its digits.
__device__ inline uint32_t radix_key(int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; }
__device__ inline uint64_t radix_key(int64_t key) {
  return static_cast<uint64_t>(key) ^ 0x8000000000000000ull;
}

// One block per row. Radix selection finds the key of the prune-th smallest score, digit by digit. The kernel
// then removes all smaller scores, and of the equal ones those with the lowest indices. The counters are
// integers, so the result does not depend on the order of the atomics. 0 < prune, columns ≤ kWidestMaskRow.
template <class T>
__global__ void __launch_bounds__(kMaskRowThreads)
    mask_rows(const T* __restrict__ score, int columns, int prune, bool* __restrict__ removed) {
  using Math = at::opmath_type<T>;
  using Key = std::make_unsigned_t<OrderedKey<Math>>;
  __shared__ int count[kMaskDigits];
  __shared__ Key shared_prefix;
  __shared__ int shared_left;
  __shared__ int warp_ties[kMaskRowThreads / 32];

  const T* row = score + static_cast<int64_t>(blockIdx.x) * columns;
  bool* out = removed + static_cast<int64_t>(blockIdx.x) * columns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  Key prefix = 0;    // the digits found so far, the rest 0
  int left = prune;  // how many of the scores with this prefix are removed
  for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
    for (int d = threadIdx.x; d < kMaskDigits; d += kMaskRowThreads) count[d] = 0;
    __syncthreads();
    // mask of the digits above this one; a shift by the full width would be undefined
    const Key above = shift + 8 < 8 * static_cast<int>(sizeof(Key)) ? ~Key(0) << (shift + 8) : Key(0);
    for (int j = threadIdx.x; j < columns; j += kMaskRowThreads) {
      const Key key = radix_key(ordered_key(static_cast<Math>(row[j])));
      if ((key & above) == prefix) atomicAdd(&count[(key >> shift) & 0xff], 1);
    }
    __syncthreads();
    if (warp == 0) {
      constexpr int kEach = kMaskDigits / 32;
      int sum = 0;
      for (int d = lane * kEach; d < (lane + 1) * kEach; ++d) sum += count[d];
      int through = sum;  // scores whose digit belongs to this lane or to a lower lane
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += lower;
      }
      // true in exactly one lane: 1 ≤ left ≤ the number of scores with the prefix
      if (through - sum < left && left <= through) {
        int d = lane * kEach, rest = left - (through - sum);
        while (count[d] < rest) rest -= count[d++];
        shared_prefix = prefix | static_cast<Key>(d) << shift;
        shared_left = rest;
      }
    }
    __syncthreads();
    prefix = shared_prefix;
    left = shared_left;
  }

  // now prefix is the key of the largest removed score, left the number of scores with this key to remove
  for (int start = 0; start < columns; start += kMaskRowThreads) {
    const int j = start + threadIdx.x;
    const Key key = j < columns ? radix_key(ordered_key(static_cast<Math>(row[j]))) : ~Key(0);
    const bool tie = j < columns && key == prefix;
    const unsigned ties = __ballot_sync(0xffffffffu, tie);
    if (lane == 0) warp_ties[warp] = __popc(ties);
    __syncthreads();
    int before = __popc(ties & ((1u << lane) - 1)), all = 0;
    for (int w = 0; w < kMaskRowThreads / 32; ++w) {
      before += w < warp ? warp_ties[w] : 0;
      all += warp_ties[w];
    }
    if (j < columns) out[j] = key < prefix || (tie && before < left);
    left -= all;
    __syncthreads();  // before warp_ties is overwritten
  }
}

// launcher: a Launcher (common/cuda/launcher.cuh). rows is at least 1.
template <class T, class LauncherT>
void run_mask_rows(LauncherT& launcher, const T* score, int64_t rows, int columns, int prune, bool* removed) {
  launcher.launch(mask_rows<T>, dim3(static_cast<unsigned>(rows)), dim3(kMaskRowThreads), /*shared_bytes=*/0,
                  score, columns, prune, removed);
}

}  // namespace drot
