// entropy_loss of rows of up to 8192 columns (fp64: 4096), and what all kernels of entropy_loss share. One
// block holds a row in its registers, so that y is read once and dy is written once.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/column_scale.cuh"
#include "common/cuda/reduce.cuh"
#include "common/score_math.h"
#include "ops/entropy_loss_math.h"

namespace drot {

// The arguments of one call. All arrays are contiguous and on the GPU.
template <class T>
struct EntropyProblem {
  using Math = at::opmath_type<T>;
  const T* y;                // [rows, columns]
  const Math* column_scale;  // [columns], or null for ones
  int64_t rows, columns;
  double scale;         // factor of the loss
  T* dy;                // [rows, columns]
  Math* dcolumn_scale;  // [columns]; null if column_scale is null
  Math* loss;           // one value

  // Whether every row can be read and written 16 bytes at a time.
  bool vectorizable() const {
    return columns % kVectorSize<T> == 0 && is_aligned(y) && is_aligned(dy) &&
           (column_scale == nullptr || is_aligned(column_scale));
  }
};

// NaN if a sum has overflowed or a score is NaN.
DROT_HOST_DEVICE double checked_entropy(const EntropySums<double>& sums) {
  return entropy_of(sums) + (sums.z - sums.z) + (sums.t - sums.t);
}

// The sum of the entropies of the rows that a warp has finished. The logarithm of Z, in double, is slow: each
// lane keeps the sums of one row, and 32 logarithms are computed at once.
struct EntropyTally {
  EntropySums<double> kept;
  double loss = 0;  // sum over the rows of this lane
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

constexpr int kRowThreads = 512;  // at most 128 registers per thread

template <class Math>
struct RowScratch {
  double sums[2][kRowThreads / 32];  // Z and T of each warp
  Math mean_log, weight;             // members of the row's EntropyGroup
};

// Adds up the parts of Z and T that the threads of a block hold, and returns the row's EntropyGroup, for the
// gradient, to every thread. Every thread must call it. The first warp adds the row's entropy to its tally.
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

// Columns of a thread: 16 (fp64: 8). Their y, their logarithms, their sums of dcolumn_scale and the y of the
// next row, which is loaded meanwhile, take 64 registers. The column scales are read from the cache for each
// row.
template <class T>
constexpr int kOwned = static_cast<int>(64 / sizeof(at::opmath_type<T>));
template <class T>
constexpr int64_t kWidestInRegisters = kRowThreads * kOwned<T>;

// dcolumn_scale_of_block [blocks, columns] and loss_of_block [blocks]: sums over the rows of each block.
template <class T, bool kScaled>
__global__ void __launch_bounds__(kRowThreads)
    entropy_rows_in_registers(const EntropyProblem<T> a,
                              at::opmath_type<T>* __restrict__ dcolumn_scale_of_block,
                              double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  constexpr int kVec = kVectorSize<T>, kVectors = kOwned<T> / kVec;
  __shared__ RowScratch<Math> scratch;
  __shared__ double loss_scratch[32];

  int column[kVectors];
  Math dcolumn_scale[kVectors][kVec];
  double invalid = 0;  // NaN if a column scale is invalid
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    column[p] = (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec;
    Math column_scale[kVec];
    if (kScaled) load_values(a.column_scale + column[p], column[p] < a.columns, column_scale);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      dcolumn_scale[p][v] = 0;
      if (kScaled) invalid += nan_if_invalid_scale(column_scale[v]);
    }
  }

  AlignedVector<T, kVec> next[kVectors];
  const auto fetch = [&](int64_t row) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      next[p] =
          load_aligned<T, kVec>(a.y + row * a.columns + column[p], row < a.rows && column[p] < a.columns);
    }
  };
  fetch(blockIdx.x);
  EntropyTally tally;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    AlignedVector<T, kVec> y[kVectors];
#pragma unroll
    for (int p = 0; p < kVectors; ++p) y[p] = next[p];
    fetch(row + gridDim.x);

    Math log[kVectors][kVec], z = 0, t = 0;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Math column_scale[kVec];
      if (kScaled) load_values(a.column_scale + column[p], column[p] < a.columns, column_scale);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math s =
            counted_score(score_of(static_cast<Math>(y[p].get(v)), kScaled ? column_scale[v] : Math(1)));
        log[p][v] = log_or_none(s);
        z += s;
        t += s * log[p][v];
      }
    }
    const EntropyGroup<Math> group = close_row(z, t, a.scale, scratch, tally);
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Math column_scale[kVec];
      if (kScaled) load_values(a.column_scale + column[p], column[p] < a.columns, column_scale);
      AlignedVector<T, kVec> out;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math w = static_cast<Math>(y[p].get(v)), part = kScaled ? w * column_scale[v] : w;
        const Math ds = entropy_slope(log[p][v], group);
        if (kScaled) dcolumn_scale[p][v] += w * (w * ds);
        out.set(v, static_cast<T>(2 * part * ds));
      }
      if (column[p] < a.columns) {
        store_aligned(a.dy + row * a.columns + column[p], out);
      }
    }
  }

  const double loss = block_sum(tally.total() + invalid, loss_scratch);
  if (threadIdx.x == 0) loss_of_block[blockIdx.x] = loss;
  if constexpr (kScaled) {
    Math* out = dcolumn_scale_of_block + static_cast<int64_t>(blockIdx.x) * a.columns;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (column[p] < a.columns) store_values(out + column[p], dcolumn_scale[p]);
    }
  }
}

template <class T, bool kScaled, class LauncherT>
void launch_entropy_rows_in_registers(LauncherT& launcher, const EntropyProblem<T>& a) {
  using Math = at::opmath_type<T>;
  constexpr int64_t kOfWarp = 32 * kOwned<T>;
  const int64_t threads = (a.columns + kOfWarp - 1) / kOfWarp * 32;
  const int64_t blocks = std::min(a.rows, kRowThreads / threads * launcher.multiprocessors());
  Math* dcolumn_scale = kScaled ? launcher.template allocate<Math>(blocks * a.columns) : nullptr;
  double* loss = launcher.template allocate<double>(blocks);
  launcher.launch(entropy_rows_in_registers<T, kScaled>, dim3(blocks), dim3(threads), 0, a, dcolumn_scale,
                  loss);
  if (kScaled) {
    launch_sum_columns(launcher, static_cast<const Math*>(dcolumn_scale), blocks, a.columns, a.dcolumn_scale);
  }
  launch_sum_losses(launcher, static_cast<const double*>(loss), blocks, a.scale, a.loss);
}

}  // namespace drot
