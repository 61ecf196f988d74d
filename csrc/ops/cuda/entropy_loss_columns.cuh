// entropy_loss of the columns, or of rows and columns; used by entropy_loss_launch.cuh. A first pass over y
// computes the sums of the columns and of the rows, a second pass the gradient. Both compute the logarithms.
#pragma once

#include "common/cuda/column_walk.cuh"
#include "ops/cuda/entropy_loss_rows.cuh"

namespace drot {

constexpr int kAtOnce = 4;    // rows that a warp loads at once
constexpr int kResident = 3;  // blocks per multiprocessor, so at most 80 registers per thread

// z_of_chunk, t_of_chunk [chunks, columns]: Z and T of the columns, over the rows of each chunk.
// of_rows [rows, tiles, 2]: Z and T of the rows, over the columns of each tile; unused unless kByRow.
template <class T, int kVec, bool kScaled, bool kByRow>
__global__ void __launch_bounds__(kWalkThreads, kResident)
    entropy_sums(const EntropyProblem<T> a, int64_t chunk, at::opmath_type<T>* __restrict__ z_of_chunk,
                 at::opmath_type<T>* __restrict__ t_of_chunk, at::opmath_type<T>* __restrict__ of_rows) {
  using Math = at::opmath_type<T>;
  __shared__ Math scratch[kWalkWarps][kSlice][32];
  const ColumnWalk walk(32 * kVec, kVec, a.rows, chunk, kAtOnce);
  const bool inside = walk.start < a.columns;
  Math column_scale[kVec], z[kVec], t[kVec];
  if (kScaled) load_values(a.column_scale + walk.start, inside, column_scale);
#pragma unroll
  for (int v = 0; v < kVec; ++v) z[v] = t[v] = 0;
  for (int64_t row = walk.first; row < walk.last; row += kWalkWarps * kAtOnce) {
    AlignedVector<T, kVec> y[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      y[r] = load_aligned<T, kVec>(a.y + (row + r) * a.columns + walk.start, inside && row + r < walk.last);
    }
    Math of_thread[2 * kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      Math row_z = 0, row_t = 0;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math s =
            counted_score(score_of(static_cast<Math>(y[r].get(v)), kScaled ? column_scale[v] : Math(1)));
        const Math product = s * log_or_none(s);
        z[v] += s;
        t[v] += product;
        if (kByRow) {
          row_z += s;
          row_t += product;
        }
      }
      of_thread[2 * r] = row_z;
      of_thread[2 * r + 1] = row_t;
    }
    if (kByRow) {
      constexpr int kHolders = 32 / (2 * kAtOnce);
      const Math of_warp = warp_sums(of_thread);
      const int lane = threadIdx.x % 32, which = lane / kHolders;
      if (lane % kHolders == 0 && row + which / 2 < walk.last) {
        of_rows[((row + which / 2) * gridDim.x + blockIdx.x) * 2 + which % 2] = of_warp;
      }
    }
  }
  const int64_t at = blockIdx.y * a.columns + walk.tile, width = a.columns - walk.tile;
  sum_over_warps(z, kVec, scratch, z_of_chunk + at, width);
  sum_over_warps(t, kVec, scratch, t_of_chunk + at, width);
}

// From the sums of the chunks: group [columns], for the gradient, and loss [blocks], sums of entropies. One
// block of kSumTile × kSumTile threads for each kSumTile columns.
template <class Math>
__global__ void __launch_bounds__(kSumTile* kSumTile)
    entropy_column_groups(const Math* __restrict__ z_of_chunk, const Math* __restrict__ t_of_chunk,
                          int64_t chunks, int64_t columns, const Math* __restrict__ column_scale,
                          double scale, EntropyGroup<Math>* __restrict__ group, double* __restrict__ loss) {
  __shared__ double scratch[kSumTile][kSumTile + 1];
  const double z = tile_column_sum(z_of_chunk, chunks, columns, scratch);
  const double t = tile_column_sum(t_of_chunk, chunks, columns, scratch);
  if (threadIdx.y != 0) return;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kSumTile + threadIdx.x;
  double entropy = 0;
  if (j < columns) {
    const EntropySums<double> sums{z, t};
    group[j] = entropy_group<Math>(sums, scale);
    entropy = checked_entropy(sums);
    if (column_scale != nullptr) entropy += nan_if_invalid_scale(column_scale[j]);
  }
  entropy = warp_sum(entropy);
  if (threadIdx.x == 0) loss[blockIdx.x] = entropy;
}

// From the sums of the tiles: group [rows], for the gradient, and loss [blocks], sums of entropies. One warp
// per row.
template <class Math>
__global__ void __launch_bounds__(kWalkThreads)
    entropy_row_groups(const Math* __restrict__ of_rows, int64_t rows, int64_t tiles, double scale,
                       EntropyGroup<Math>* __restrict__ group, double* __restrict__ loss) {
  __shared__ double scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWalkWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  double z = 0, t = 0;
  if (row < rows) {
    for (int64_t tile = lane; tile < tiles; tile += 32) {
      z += of_rows[(row * tiles + tile) * 2];
      t += of_rows[(row * tiles + tile) * 2 + 1];
    }
  }
  const double sum_z = warp_sum(z), sum_t = warp_sum(t);
  const EntropySums<double> sums{sum_z, sum_t};
  if (lane == 0 && row < rows) group[row] = entropy_group<Math>(sums, scale);
  const double entropy = block_sum(lane == 0 ? checked_entropy(sums) : 0.0, scratch);
  if (threadIdx.x == 0) loss[blockIdx.x] = entropy;
}

// Writes dy, and dcolumn_scale_of_chunk [chunks, columns]: sums over the rows of each chunk. of_column
// [columns]; of_row [rows], null unless kByRow.
template <class T, int kVec, bool kScaled, bool kByRow>
__global__ void __launch_bounds__(kWalkThreads, kResident)
    entropy_gradients(const EntropyProblem<T> a, int64_t chunk,
                      const EntropyGroup<at::opmath_type<T>>* __restrict__ of_column,
                      const EntropyGroup<at::opmath_type<T>>* __restrict__ of_row,
                      at::opmath_type<T>* __restrict__ dcolumn_scale_of_chunk) {
  using Math = at::opmath_type<T>;
  __shared__ Math scratch[kWalkWarps][kSlice][32];
  const ColumnWalk walk(32 * kVec, kVec, a.rows, chunk, kAtOnce);
  const bool inside = walk.start < a.columns;
  Math column_scale[kVec], dcolumn_scale[kVec];
  EntropyGroup<Math> group[kVec];
  if (kScaled) load_values(a.column_scale + walk.start, inside, column_scale);
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    dcolumn_scale[v] = 0;
    if (inside) group[v] = of_column[walk.start + v];
  }
  for (int64_t row = walk.first; row < walk.last; row += kWalkWarps * kAtOnce) {
    AlignedVector<T, kVec> y[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      y[r] = load_aligned<T, kVec>(a.y + (row + r) * a.columns + walk.start, inside && row + r < walk.last);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (row + r >= walk.last) break;
      EntropyGroup<Math> row_group;
      if (kByRow) row_group = of_row[row + r];
      AlignedVector<T, kVec> out;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const Math w = static_cast<Math>(y[r].get(v)), part = kScaled ? w * column_scale[v] : w;
        const Math log = log_or_none(w * part);
        Math ds = entropy_slope(log, group[v]);
        if (kByRow) ds += entropy_slope(log, row_group);
        if (kScaled) dcolumn_scale[v] += w * (w * ds);
        out.set(v, static_cast<T>(2 * part * ds));
      }
      if (inside) store_aligned(a.dy + (row + r) * a.columns + walk.start, out);
    }
  }
  if (kScaled) {
    sum_over_warps(dcolumn_scale, kVec, scratch, dcolumn_scale_of_chunk + blockIdx.y * a.columns + walk.tile,
                   a.columns - walk.tile);
  }
}

template <class T, int kVec, bool kScaled, bool kByRow, class LauncherT>
void launch_entropy_columns(LauncherT& launcher, const EntropyProblem<T>& a) {
  using Math = at::opmath_type<T>;
  using Group = EntropyGroup<Math>;
  const ColumnGrid grid(a.rows, a.columns, 32 * kVec, kAtOnce, kResident * launcher.multiprocessors());
  const dim3 blocks(grid.tiles, grid.chunks);
  Math* z = launcher.template allocate<Math>(grid.chunks * a.columns);
  Math* t = launcher.template allocate<Math>(grid.chunks * a.columns);
  Math* of_rows = kByRow ? launcher.template allocate<Math>(a.rows * grid.tiles * 2) : nullptr;
  launcher.launch(entropy_sums<T, kVec, kScaled, kByRow>, blocks, dim3(kWalkThreads), 0, a, grid.chunk, z, t,
                  of_rows);

  const int64_t column_blocks = (a.columns + kSumTile - 1) / kSumTile;
  const int64_t row_blocks = kByRow ? (a.rows + kWalkWarps - 1) / kWalkWarps : 0;
  double* loss = launcher.template allocate<double>(column_blocks + row_blocks);
  Group* of_column = launcher.template allocate<Group>(a.columns);
  Group* of_row = kByRow ? launcher.template allocate<Group>(a.rows) : nullptr;
  launcher.launch(entropy_column_groups<Math>, dim3(column_blocks), dim3(kSumTile, kSumTile), 0, z, t,
                  grid.chunks, a.columns, a.column_scale, a.scale, of_column, loss);
  if (kByRow) {
    launcher.launch(entropy_row_groups<Math>, dim3(row_blocks), dim3(kWalkThreads), 0, of_rows, a.rows,
                    grid.tiles, a.scale, of_row, loss + column_blocks);
  }

  Math* dcolumn_scale = kScaled ? launcher.template allocate<Math>(grid.chunks * a.columns) : nullptr;
  launcher.launch(entropy_gradients<T, kVec, kScaled, kByRow>, blocks, dim3(kWalkThreads), 0, a, grid.chunk,
                  of_column, of_row, dcolumn_scale);
  if (kScaled) {
    launch_sum_columns(launcher, static_cast<const Math*>(dcolumn_scale), grid.chunks, a.columns,
                       a.dcolumn_scale);
  }
  launch_sum_losses(launcher, static_cast<const double*>(loss), column_blocks + row_blocks, a.scale, a.loss);
}

}  // namespace drot
