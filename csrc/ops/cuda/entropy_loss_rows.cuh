// entropy_loss of rows of up to 8192 columns (fp64: 4096): a row lies in the registers of one block, so y is
// read once and dy written once.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/score_math.h"
#include "ops/cuda/pack.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/entropy_loss_math.h"

namespace drot {

// What one call works on; everything is contiguous and on the device.
template <class T>
struct EntropyProblem {
  using Math = at::opmath_type<T>;
  const T* y;     // [rows, columns]
  const Math* m;  // [columns], or null for ones
  int64_t rows, columns;
  double scale;
  T* dy;
  Math* dm;    // [columns], or null where m is
  Math* loss;  // one value

  // Whether every row can be moved 16 bytes at a time.
  bool wide() const {
    return columns % kWide<T> == 0 && aligned(y) && aligned(dy) && (m == nullptr || aligned(m));
  }
};

// Sums that overflowed, or NaN among the scores, make it NaN.
DROT_HOST_DEVICE double checked_entropy(const EntropySums<double>& sums) {
  return entropy_of(sums) + (sums.z - sums.z) + (sums.t - sums.t);
}

// The entropies that one warp adds up. The logarithm of Z, in double, is slow: a lane keeps the sums of a row
// until all 32 have some.
struct EntropyTally {
  EntropySums<double> kept;
  double loss = 0;  // of this lane
  int turn = 0;

  __device__ void add(const EntropySums<double>& sums) {
    if (static_cast<int>(threadIdx.x % 32) == turn) kept = sums;
    if (++turn == 32) {
      loss += checked_entropy(kept);
      kept = {};
      turn = 0;
    }
  }
  __device__ double total() const { return loss + checked_entropy(kept); }
};

// 128 registers a thread.
constexpr int kRowThreads = 512;

template <class Math>
struct RowScratch {
  double sums[2][kRowThreads / 32];  // Z and T, by warp
  Math mean_log, weight;             // of the EntropyGroup
};

// A row whose Z and T the threads of a block hold in parts: what its gradient needs, given to every thread.
// Every thread calls it; the first warp notes the entropy.
template <class Math, class Sum>
__device__ EntropyGroup<Math> close_row(Sum z, Sum t, double scale, RowScratch<Math>& scratch,
                                        EntropyTally& tally) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  // Z in the lower half of the lanes, T in the upper
  const int place = lane % 16, which = lane / 16;
  Sum of_thread[2] = {z, t};
  const Sum of_warp = warp_sums(of_thread);
  if (place == 0) scratch.sums[which][warp] = of_warp;
  __syncthreads();
  if (warp == 0) {
    double x = place < warps ? scratch.sums[which][place] : 0.0;
#pragma unroll
    for (int half = 8; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
    const double other = __shfl_xor_sync(0xffffffffu, x, 16);
    const EntropySums<double> sums{which == 0 ? x : other, which == 0 ? other : x};
    if (lane == 0) {
      const auto group = entropy_group<Math>(sums, scale);
      scratch.mean_log = group.mean_log;
      scratch.weight = group.weight;
    }
    tally.add(sums);
  }
  __syncthreads();
  return {scratch.mean_log, scratch.weight};
}

// A thread owns 16 columns (fp64: 8): their y, logarithms, sums of dm and the y of the next row, which is on
// its way meanwhile, are 64 registers. The factors come from the cache each time.
template <class T>
constexpr int kOwned = static_cast<int>(64 / sizeof(at::opmath_type<T>));
template <class T>
constexpr int64_t kWidestInRegisters = kRowThreads * kOwned<T>;

// dm [blocks, columns] and loss [blocks] get the sums of each block's rows.
template <class T, bool kFactor>
__global__ void __launch_bounds__(kRowThreads)
    entropy_rows_in_registers(const EntropyProblem<T> a, at::opmath_type<T>* __restrict__ dm_of_block,
                              double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  constexpr int kVec = kWide<T>, kPacks = kOwned<T> / kVec;
  __shared__ RowScratch<Math> scratch;
  __shared__ double loss_scratch[32];

  int column[kPacks];
  Math dm[kPacks][kVec];
  double report = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    column[p] = (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec;
    Math m[kVec];
    if (kFactor) load_values(a.m + column[p], column[p] < a.columns, m);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      dm[p][v] = 0;
      if (kFactor) report += report_factor(m[v]);
    }
  }

  Pack<T, kVec> next[kPacks];
  const auto fetch = [&](int64_t row) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      next[p] = load_pack<T, kVec>(a.y + row * a.columns + column[p], row < a.rows && column[p] < a.columns);
    }
  };
  fetch(blockIdx.x);
  EntropyTally tally;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Pack<T, kVec> y[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) y[p] = next[p];
    fetch(row + gridDim.x);

    Math log[kPacks][kVec], z = 0, t = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Math m[kVec];
      if (kFactor) load_values(a.m + column[p], column[p] < a.columns, m);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math s = counted_score(score_of(static_cast<Math>(y[p].get(v)), kFactor ? m[v] : Math(1)));
        log[p][v] = log_or_none(s);
        z += s;
        t += s * log[p][v];
      }
    }
    const EntropyGroup<Math> group = close_row(z, t, a.scale, scratch, tally);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Math m[kVec];
      if (kFactor) load_values(a.m + column[p], column[p] < a.columns, m);
      Pack<T, kVec> out;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math w = static_cast<Math>(y[p].get(v)), part = kFactor ? w * m[v] : w;
        const Math ds = entropy_slope(log[p][v], group);
        if (kFactor) dm[p][v] += w * (w * ds);
        out.set(v, static_cast<T>(2 * part * ds));
      }
      if (column[p] < a.columns) {
        *reinterpret_cast<Pack<T, kVec>*>(a.dy + row * a.columns + column[p]) = out;
      }
    }
  }

  const double loss = block_sum(tally.total() + report, loss_scratch);
  if (threadIdx.x == 0) loss_of_block[blockIdx.x] = loss;
  if constexpr (kFactor) {
    Math* out = dm_of_block + static_cast<int64_t>(blockIdx.x) * a.columns;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (column[p] < a.columns) store_values(out + column[p], dm[p]);
    }
  }
}

template <class T, bool kFactor, class Gpu>
void launch_entropy_rows_in_registers(Gpu& gpu, const EntropyProblem<T>& a) {
  using Math = at::opmath_type<T>;
  constexpr int64_t kOfWarp = 32 * kOwned<T>;
  const int64_t threads = (a.columns + kOfWarp - 1) / kOfWarp * 32;
  const int64_t blocks = std::min(a.rows, kRowThreads / threads * gpu.processors());
  Math* dm = kFactor ? gpu.template room<Math>(blocks * a.columns) : nullptr;
  double* loss = gpu.template room<double>(blocks);
  gpu.launch(entropy_rows_in_registers<T, kFactor>, dim3(blocks), dim3(threads), 0, a, dm, loss);
  if (kFactor) launch_sum_columns(gpu, static_cast<const Math*>(dm), blocks, a.columns, a.dm);
  launch_sum_losses(gpu, static_cast<const double*>(loss), blocks, a.scale, a.loss);
}

}  // namespace drot
