// entropy_loss by row, with a row in the registers of one block.
#pragma once

#include <ATen/OpMathType.h>

#include <cstdint>

#include "common/score_math.h"
#include "ops/cuda/reduce.cuh"
#include "ops/entropy_loss_math.h"

namespace drot {

template <class T>
struct EntropyProblem {
  const T* y;                   // [rows, columns]
  const at::opmath_type<T>* m;  // [columns] or null
  int64_t rows, columns;
  double scale;
  T* dy;
};

// Values that one instruction of 16 bytes moves.
template <class T>
constexpr int kVec = 16 / sizeof(T);

// kVec neighbouring factors from m + j; 1 where there are none.
template <int kVec, class Math>
__device__ void load_factors(const Math* m, int64_t j, Math (&out)[kVec]) {
  if (m == nullptr) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) out[v] = 1;
    return;
  }
  constexpr int kPart = kVec * sizeof(Math) > 16 ? 16 / sizeof(Math) : kVec;  // of one load
#pragma unroll
  for (int part = 0; part < kVec; part += kPart) {
    const auto pack = *reinterpret_cast<const Pack<Math, kPart>*>(m + j + part);
#pragma unroll
    for (int v = 0; v < kPart; ++v) out[part + v] = pack.v[v];
  }
}

// A factor must not be negative, nor NaN; the loss is to show it.
template <class Math>
__device__ double report_of_factor(Math m) {
  return m >= Math(0) ? 0.0 : static_cast<double>(NAN);
}

// z and t summed over the block, given to every thread. Calls take turns between two scratches, so
// that one barrier a call is enough.
template <int kThreads>
__device__ EntropySums<double> block_entropy_sums(double z, double t, double (&scratch)[kThreads / 32][2]) {
  z = warp_sum(z);
  t = warp_sum(t);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) {
    scratch[warp][0] = z;
    scratch[warp][1] = t;
  }
  __syncthreads();
  z = warp_sum(lane < kThreads / 32 ? scratch[lane][0] : 0.0);
  t = warp_sum(lane < kThreads / 32 ? scratch[lane][1] : 0.0);
  return {z, t};
}

// A block takes rows blockIdx.x, + gridDim.x, …; a thread owns kEach columns of each, in packs of kVec<T>:
// columns (pack · kThreads + threadIdx.x) · kVec + v. losses [gridDim.x]; dm_partial [gridDim.x, columns],
// Σ over the block's rows. Needs columns <= kThreads · kEach and whole aligned packs.
template <class T, int kThreads, int kEach, bool kFactor>
__global__ void __launch_bounds__(kThreads)
    entropy_held_rows(const EntropyProblem<T> p, double* __restrict__ losses,
                      at::opmath_type<T>* __restrict__ dm_partial) {
  using Math = at::opmath_type<T>;
  constexpr int kVec = drot::kVec<T>, kPacks = kEach / kVec;
  static_assert(kPacks * kVec == kEach);
  __shared__ double scratch[2][kThreads / 32][2];
  const auto column = [](int pack) { return (int64_t{pack} * kThreads + threadIdx.x) * kVec; };

  double loss = 0;
  Math dm[kFactor ? kEach : 1];
  if constexpr (kFactor) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        dm[pack * kVec + v] = 0;
        if (column(pack) < p.columns) loss += report_of_factor(p.m[column(pack) + v]);
      }
    }
  }

  Pack<T, kVec> next[kPacks];
  const auto load = [&](int64_t row) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (column(pack) < p.columns) {
        next[pack] = *reinterpret_cast<const Pack<T, kVec>*>(p.y + row * p.columns + column(pack));
      } else {
#pragma unroll
        for (int v = 0; v < kVec; ++v)
          next[pack].v[v] = static_cast<T>(0.0f);  // a score of 0 counts for nothing
      }
    }
  };
  load(blockIdx.x);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    Pack<T, kVec> y[kPacks];
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) y[pack] = next[pack];
    if (row + gridDim.x < p.rows) load(row + gridDim.x);

    Math log[kEach];
    Math z = 0, t = 0;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      Math m[kVec];
      load_factors<kVec, Math>(kFactor && column(pack) < p.columns ? p.m : nullptr, column(pack), m);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math s = score_of(static_cast<Math>(y[pack].v[v]), m[v]);
        log[pack * kVec + v] = log_or_none(s);
        z += counted_score(s);
        t += counted_score(s) * log[pack * kVec + v];
      }
    }
    const EntropySums<double> sums = block_entropy_sums<kThreads>(z, t, scratch[turn]);
    const EntropyGroup<Math> group = entropy_group<Math>(sums, p.scale);
    if (threadIdx.x == 0) loss += entropy_of(sums);

#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (column(pack) >= p.columns) continue;
      Math m[kVec];
      load_factors<kVec, Math>(kFactor ? p.m : nullptr, column(pack), m);
      Pack<T, kVec> out;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math w = static_cast<Math>(y[pack].v[v]);
        const Math slope = entropy_slope(log[pack * kVec + v], group);
        out.v[v] = static_cast<T>(2 * (w * m[v]) * slope);
        if constexpr (kFactor) dm[pack * kVec + v] += w * (w * slope);
      }
      *reinterpret_cast<Pack<T, kVec>*>(p.dy + row * p.columns + column(pack)) = out;
    }
  }

  if constexpr (kFactor) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (column(pack) >= p.columns) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        dm_partial[blockIdx.x * p.columns + column(pack) + v] = dm[pack * kVec + v];
      }
    }
  }
  __syncthreads();  // the last row's sums have been read
  loss = block_entropy_sums<kThreads>(loss, 0, scratch[0]).z;
  if (threadIdx.x == 0) losses[blockIdx.x] = loss;
}

}  // namespace drot
