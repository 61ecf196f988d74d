// The kernels of column_scale and column_scale_backward, and their launch. tests/native compiles this file
// for a CPU too.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/stack_tile.cuh"
#include "ops/column_scale_math.h"

namespace drot {

constexpr int kStripThreads = 512, kStripWarps = kStripThreads / 32;
constexpr int kStripColumns = 32;  // columns of a block of column_scale_strips

// product: `count` matrices [rows, n]; out: [count, n].
struct ColumnScaleProblem {
  const c10::BFloat16* product;
  float* out;
  int64_t count, rows, n;
  bool inverse;
};

// product and out: `count` matrices [rows, n]; value and gradient: [count, n].
struct ColumnScaleBackwardProblem {
  const c10::BFloat16* product;
  const float *value, *gradient;
  c10::BFloat16* out;
  int64_t count, rows, n;
  bool inverse;
};

// A block has kStripColumns columns of a matrix and all its rows. A thread adds kVec columns over every
// kStep-th row; the sums of the threads are added in a fixed order, so that results repeat bit for bit. kVec
// divides n.
template <int kVec>
__global__ void __launch_bounds__(kStripThreads) column_scale_strips(ColumnScaleProblem p, int64_t strips) {
  constexpr int kLanes = kStripColumns / kVec;  // threads that share a row
  constexpr int kStep = kStripThreads / kLanes;
  __shared__ float scratch[kStripWarps][kStripColumns];
  const int64_t matrix = blockIdx.x / strips, strip = blockIdx.x % strips * kStripColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, within = threadIdx.x % kLanes * kVec;
  const bool inside = strip + within < p.n;
  const c10::BFloat16* start = p.product + matrix * p.rows * p.n + strip + within;
  float sums[kVec] = {};
#pragma unroll 4
  for (int64_t row = threadIdx.x / kLanes; row < p.rows; row += kStep) {
    const auto x = load_aligned<c10::BFloat16, kVec>(start + row * p.n, inside);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float element = x.get(v);
      sums[v] += element * element;
    }
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) sums[v] += __shfl_xor_sync(0xffffffffu, sums[v], step);
    if (lane < kLanes) scratch[warp][within + v] = sums[v];
  }
  __syncthreads();
  if (threadIdx.x < kStripColumns && strip + threadIdx.x < p.n) {
    float q = 0;
#pragma unroll
    for (int w = 0; w < kStripWarps; ++w) q += scratch[w][threadIdx.x];
    p.out[matrix * p.n + strip + threadIdx.x] = scale_of_column(q, p.inverse);
  }
}

// kVec divides n.
template <int kVec>
__global__ void __launch_bounds__(kStackThreads) column_scale_tiles(ColumnScaleBackwardProblem p) {
  const StackTile<kVec> tile(p.rows, p.n);
  if (!tile.inside) return;
  float scale[kVec], dq[kVec];
  load_values(p.value + tile.matrix * p.n + tile.column, true, scale);
  load_values(p.gradient + tile.matrix * p.n + tile.column, true, dq);
#pragma unroll
  for (int v = 0; v < kVec; ++v) dq[v] = gradient_in_q(scale[v], dq[v], p.inverse);
#pragma unroll 4
  for (int64_t row = tile.first; row < tile.last; row += tile.kStep) {
    const int64_t at = (tile.matrix * p.rows + row) * p.n + tile.column;
    const auto x = load_aligned<c10::BFloat16, kVec>(p.product + at, true);
    AlignedVector<c10::BFloat16, kVec> out;
#pragma unroll
    for (int v = 0; v < kVec; ++v) out.set(v, static_cast<float>(x.get(v)) * dq[v]);
    store_global(p.out + at, out);
  }
}

template <class LauncherT>
void run_column_scale(LauncherT& launcher, const ColumnScaleProblem& p) {
  constexpr int kVec = kVectorSize<c10::BFloat16>;
  const int64_t strips = (p.n + kStripColumns - 1) / kStripColumns;
  const bool vectors = p.n % kVec == 0 && is_aligned(p.product);
  launcher.launch(vectors ? column_scale_strips<kVec> : column_scale_strips<1>, dim3(p.count * strips),
                  dim3(kStripThreads), 0, p, strips);
}

template <class LauncherT>
void run_column_scale_backward(LauncherT& launcher, const ColumnScaleBackwardProblem& p) {
  constexpr int kVec = kVectorSize<c10::BFloat16>;
  const bool vectors = p.n % kVec == 0 && is_aligned(p.product) && is_aligned(p.value) &&
                       is_aligned(p.gradient) && is_aligned(p.out);
  launcher.launch(vectors ? column_scale_tiles<kVec> : column_scale_tiles<1>,
                  dim3(stack_tiles(p.count, p.rows, p.n)), dim3(kStackThreads), 0, p);
}

}  // namespace drot
