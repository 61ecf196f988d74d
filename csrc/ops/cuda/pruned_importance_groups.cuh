// pruned_importance of groups: a thread owns one group of columns.
#pragma once

#include <ATen/OpMathType.h>

#include <cstdint>

#include "common/score_math.h"
#include "common/selection_math.h"
#include "ops/cuda/reduce.cuh"

namespace drot {

constexpr int kGroupThreads = 256;

template <class T>
struct PrunedProblem {
  using Math = at::opmath_type<T>;
  const T* y;
  const Math* m;        // [columns] or null
  const bool* removed;  // [rows, columns] where the mask is given (group 1), else null
  int64_t rows, columns;
  int64_t chunk;  // rows of a block
  int group, prune;
  Math scale;
  T* dy;
  Math* dm;      // [chunks, columns] or null
  double* loss;  // [blocks]
};

// Block (tile, chunk): a thread owns one group of columns and walks down the rows of the chunk, so that
// it holds its part of m and dm in registers.
template <class T, int kGroup>
__global__ void __launch_bounds__(kGroupThreads) pruned_groups(const PrunedProblem<T> a) {
  using Math = at::opmath_type<T>;
  constexpr int kLoad = kGroup * sizeof(T) > 16 ? 16 / sizeof(T) : kGroup;  // values of one instruction
  __shared__ double scratch[32];
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x) * kGroup;
  const int64_t first = blockIdx.y * a.chunk, last = min(first + a.chunk, a.rows);
  double loss = 0;
  if (start < a.columns) {
    Math m[kGroup], dm[kGroup];
    // x - x is 0 where x is finite and NaN elsewhere, which reports to the loss what the mask may hide
    Math report = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      m[i] = a.m != nullptr ? a.m[start + i] : Math(1);
      dm[i] = 0;
      report += m[i] >= Math(0) ? m[i] - m[i] : Math(NAN);
    }
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * a.columns + start;
      Math y[kGroup], s[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; i += kLoad) {
        const auto pack = *reinterpret_cast<const Pack<T, kLoad>*>(a.y + at + i);
#pragma unroll
        for (int v = 0; v < kLoad; ++v) y[i + v] = static_cast<Math>(pack.v[v]);
      }
      uint32_t bits;
      if constexpr (kGroup == 1) {
        s[0] = score_of(y[0], m[0]);
        bits = a.removed != nullptr ? a.removed[at] : a.prune;
      } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) s[i] = score_of(y[i], m[i]);
        bits = removed_bits(s, a.prune);
      }
      Math sum = 0;
#pragma unroll
      for (int i = 0; i < kGroup; i += kLoad) {
        Pack<T, kLoad> out;
#pragma unroll
        for (int v = 0; v < kLoad; ++v) {
          const bool gone = bits >> (i + v) & 1;
          const Math slope = gone ? a.scale : Math(0), w = y[i + v];
          sum += gone ? s[i + v] : Math(0);
          report += w - w;
          dm[i + v] += gone ? w * (w * slope) : Math(0);
          out.v[v] = static_cast<T>(gone ? 2 * (w * m[i + v]) * slope : Math(0));
        }
        *reinterpret_cast<Pack<T, kLoad>*>(a.dy + at + i) = out;
      }
      loss += sum;
    }
    loss += report;
    if (a.dm != nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) a.dm[blockIdx.y * a.columns + start + i] = dm[i];
    }
  }
  loss = block_sum(loss, scratch);
  if (threadIdx.x == 0) a.loss[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = loss;
}

// The same for groups of any size, which do not fit into registers: every score is made anew from the
// cache when it is compared.
template <class T>
__global__ void __launch_bounds__(kGroupThreads) pruned_any_groups(const PrunedProblem<T> a) {
  using Math = at::opmath_type<T>;
  __shared__ double scratch[32];
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x) * a.group;
  const int64_t first = blockIdx.y * a.chunk, last = min(first + a.chunk, a.rows);
  double loss = 0;
  if (start < a.columns) {
    const auto factor = [&](int i) { return a.m != nullptr ? a.m[start + i] : Math(1); };
    Math* dm = a.dm != nullptr ? a.dm + blockIdx.y * a.columns + start : nullptr;
    for (int i = 0; i < a.group; ++i) {
      if (!(factor(i) >= Math(0))) loss = NAN;
      loss += factor(i) - factor(i);
      if (dm != nullptr) dm[i] = 0;
    }
    for (int64_t row = first; row < last; ++row) {
      const T* y = a.y + row * a.columns + start;
      const auto key = [&](int i) { return ordered_key(score_of(static_cast<Math>(y[i]), factor(i))); };
      for (int i = 0; i < a.group; ++i) {
        const auto own = key(i);
        int rank = 0;
        for (int j = 0; j < i; ++j) rank += goes_before(key(j), own);
        for (int j = i + 1; j < a.group; ++j) rank += !goes_before(own, key(j));
        const bool gone = rank < a.prune;
        const Math w = static_cast<Math>(y[i]), slope = gone ? a.scale : Math(0);
        loss += gone ? score_of(w, factor(i)) : Math(0);
        loss += w - w;
        if (dm != nullptr) dm[i] += gone ? w * (w * slope) : Math(0);
        a.dy[row * a.columns + start + i] = static_cast<T>(gone ? 2 * (w * factor(i)) * slope : Math(0));
      }
    }
  }
  loss = block_sum(loss, scratch);
  if (threadIdx.x == 0) a.loss[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = loss;
}

}  // namespace drot
