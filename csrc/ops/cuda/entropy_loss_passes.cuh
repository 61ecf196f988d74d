// entropy_loss by any axes: sums of rows, sums of columns, then the gradient. Y is read by each.
#pragma once

#include "ops/cuda/entropy_loss_rows.cuh"

namespace drot {

constexpr int kPassThreads = 256;
constexpr int64_t kPassBlocks = 1024;  // wanted; more would only make more partial sums
constexpr int64_t kLeastChunk = 16;    // rows of a block that walks down the columns

// EntropyGroup of each row or column; null where that axis does not count.
template <class Math>
struct Groups {
  Math* mean_log = nullptr;
  Math* weight = nullptr;
};

// One row after the other per block. losses [gridDim.x].
template <class T, int kVec>
__global__ void __launch_bounds__(kPassThreads)
    row_sums(const EntropyProblem<T> p, Groups<at::opmath_type<T>> groups, double* __restrict__ losses) {
  using Math = at::opmath_type<T>;
  __shared__ double scratch[2][kPassThreads / 32][2];
  double loss = 0;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    double z = 0, t = 0;
    for (int64_t j = int64_t{threadIdx.x} * kVec; j < p.columns; j += kPassThreads * kVec) {
      const auto y = *reinterpret_cast<const Pack<T, kVec>*>(p.y + row * p.columns + j);
      Math m[kVec], part_z = 0, part_t = 0;
      load_factors<kVec, Math>(p.m, j, m);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math s = score_of(static_cast<Math>(y.v[v]), m[v]);
        part_z += counted_score(s);
        part_t += counted_score(s) * log_or_none(s);
      }
      z += part_z;
      t += part_t;
    }
    const EntropySums<double> sums = block_entropy_sums<kPassThreads>(z, t, scratch[turn]);
    if (threadIdx.x == 0) {
      const EntropyGroup<Math> group = entropy_group<Math>(sums, p.scale);
      groups.mean_log[row] = group.mean_log;
      groups.weight[row] = group.weight;
      loss += entropy_of(sums);
    }
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = loss;
}

// Block (tile, chunk): a thread owns kVec columns and walks down `chunk` rows. z, t [chunks, columns].
template <class T, int kVec>
__global__ void __launch_bounds__(kPassThreads)
    column_sums(const EntropyProblem<T> p, int64_t chunk, at::opmath_type<T>* __restrict__ z,
                at::opmath_type<T>* __restrict__ t) {
  using Math = at::opmath_type<T>;
  const int64_t j = (int64_t{blockIdx.x} * kPassThreads + threadIdx.x) * kVec;
  if (j >= p.columns) return;
  const int64_t first = blockIdx.y * chunk, last = min(first + chunk, p.rows);
  Math m[kVec], sum_z[kVec], sum_t[kVec];
  load_factors<kVec, Math>(p.m, j, m);
#pragma unroll
  for (int v = 0; v < kVec; ++v) sum_z[v] = sum_t[v] = 0;
#pragma unroll 4
  for (int64_t row = first; row < last; ++row) {
    const auto y = *reinterpret_cast<const Pack<T, kVec>*>(p.y + row * p.columns + j);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Math s = score_of(static_cast<Math>(y.v[v]), m[v]);
      sum_z[v] += counted_score(s);
      sum_t[v] += counted_score(s) * log_or_none(s);
    }
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    z[blockIdx.y * p.columns + j + v] = sum_z[v];
    t[blockIdx.y * p.columns + j + v] = sum_t[v];
  }
}

// Blocks of (kSumTile, kSumTile), one for each kSumTile columns: adds the chunks up. losses [gridDim.x].
template <class Math>
__global__ void __launch_bounds__(kSumTile* kSumTile)
    close_columns(const Math* __restrict__ z, const Math* __restrict__ t, int64_t chunks, int64_t columns,
                  double scale, Groups<Math> groups, double* __restrict__ losses) {
  __shared__ double scratch[kSumTile][kSumTile + 1];
  const EntropySums<double> sums{tile_column_sum(z, chunks, columns, scratch),
                                 tile_column_sum(t, chunks, columns, scratch)};
  if (threadIdx.y != 0) return;  // the sums are with the first warp
  const int64_t j = int64_t{blockIdx.x} * kSumTile + threadIdx.x;
  double loss = 0;
  if (j < columns) {
    const EntropyGroup<Math> group = entropy_group<Math>(sums, scale);
    groups.mean_log[j] = group.mean_log;
    groups.weight[j] = group.weight;
    loss = entropy_of(sums);
  }
  loss = warp_sum(loss);
  if (threadIdx.x == 0) losses[blockIdx.x] = loss;
}

// The grid of column_sums. dm_partial [chunks, columns] or null; losses [blocks]: 0, or NaN for a
// factor that must not be.
template <class T, int kVec>
__global__ void __launch_bounds__(kPassThreads)
    gradient(const EntropyProblem<T> p, int64_t chunk, Groups<at::opmath_type<T>> rows,
             Groups<at::opmath_type<T>> columns, at::opmath_type<T>* __restrict__ dm_partial,
             double* __restrict__ losses) {
  using Math = at::opmath_type<T>;
  __shared__ double scratch[32];
  const int64_t j = (int64_t{blockIdx.x} * kPassThreads + threadIdx.x) * kVec;
  const int64_t first = blockIdx.y * chunk, last = min(first + chunk, p.rows);
  double report = 0;
  if (j < p.columns) {
    Math m[kVec], dm[kVec];
    EntropyGroup<Math> of_column[kVec];
    load_factors<kVec, Math>(p.m, j, m);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      dm[v] = 0;
      report += report_of_factor(m[v]);
      if (columns.weight != nullptr) of_column[v] = {columns.mean_log[j + v], columns.weight[j + v]};
    }
#pragma unroll 2
    for (int64_t row = first; row < last; ++row) {
      const auto y = *reinterpret_cast<const Pack<T, kVec>*>(p.y + row * p.columns + j);
      EntropyGroup<Math> of_row;
      if (rows.weight != nullptr) of_row = {rows.mean_log[row], rows.weight[row]};
      Pack<T, kVec> out;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math w = static_cast<Math>(y.v[v]);
        const Math log = log_or_none(score_of(w, m[v]));
        const Math slope = entropy_slope(log, of_row) + entropy_slope(log, of_column[v]);
        out.v[v] = static_cast<T>(2 * (w * m[v]) * slope);
        dm[v] += w * (w * slope);
      }
      *reinterpret_cast<Pack<T, kVec>*>(p.dy + row * p.columns + j) = out;
    }
    if (dm_partial != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) dm_partial[blockIdx.y * p.columns + j + v] = dm[v];
    }
  }
  report = block_sum(report, scratch);
  if (threadIdx.x == 0) losses[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = report;
}

}  // namespace drot
