// The kernels of column_dot and their launch. tests/native compiles this file for a CPU too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/reduce.cuh"

namespace drot {

constexpr int kDotColumns = 32, kDotWarps = 8;
constexpr int64_t kDotChunk = 256;  // rows of a block: 32 for each warp

// a, b: `count` matrices [rows, columns] each. out: [count, columns].
struct ColumnDotProblem {
  const float *a, *b;
  float* out;
  int64_t count, rows, columns;
};

// partial[chunk][matrix][column] = the dot product of the rows of a chunk. Block x has a tile of columns of a
// matrix, block y a chunk of rows; the warps take turns at the rows, so that a warp reads whole cache lines.
__global__ void __launch_bounds__(32 * kDotWarps)
    column_dot_tiles(ColumnDotProblem p, int64_t tiles, float* __restrict__ partial) {
  __shared__ float scratch[kDotWarps][kDotColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t matrix = blockIdx.x / tiles, column = blockIdx.x % tiles * kDotColumns + lane;
  const int64_t first = blockIdx.y * kDotChunk;
  const int64_t last = first + kDotChunk < p.rows ? first + kDotChunk : p.rows;
  float sum = 0;
  if (column < p.columns) {
#pragma unroll 8
    for (int64_t i = first + warp; i < last; i += kDotWarps) {
      const int64_t at = (matrix * p.rows + i) * p.columns + column;
      sum += p.a[at] * p.b[at];
    }
  }
  scratch[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < p.columns) {
    for (int w = 1; w < kDotWarps; ++w) sum += scratch[w][lane];
    partial[(blockIdx.y * p.count + matrix) * p.columns + column] = sum;
  }
}

// The order of every sum is fixed, so that results repeat bit for bit.
template <class LauncherT>
void run_column_dot(LauncherT& launcher, const ColumnDotProblem& p) {
  const int64_t tiles = (p.columns + kDotColumns - 1) / kDotColumns;
  const int64_t chunks = std::max<int64_t>((p.rows + kDotChunk - 1) / kDotChunk, 1);
  float* partial = chunks == 1 ? p.out : launcher.template allocate<float>(chunks * p.count * p.columns);
  launcher.launch(column_dot_tiles, dim3(p.count * tiles, chunks), dim3(32 * kDotWarps), 0, p, tiles,
                  partial);
  if (chunks > 1) launch_sum_columns(launcher, partial, chunks, p.count * p.columns, p.out);
}

}  // namespace drot
