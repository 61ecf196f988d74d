// Sums over a block and over the rows of a matrix of partial sums, in an order that is always the same.
#pragma once

#include <cstdint>

namespace drot {

template <class T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum over all threads of a one-dimensional block of whole warps, given to every thread. Every
// thread calls it; scratch holds 32 values and may be used again at once.
template <class T>
__device__ T block_sum(T x, T* scratch) {
  x = warp_sum(x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : T(0));
  __syncthreads();
  return x;
}

constexpr int kSumTile = 32;

// Threads (x, y) of a block of kSumTile²: Σ over all rows of column blockIdx.x·kSumTile + x of
// partial [rows, columns], in double, given to the threads with y = 0; 0 beyond the last column.
template <class T>
__device__ double tile_column_sum(const T* __restrict__ partial, int64_t rows, int64_t columns,
                                  double (&scratch)[kSumTile][kSumTile + 1]) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kSumTile + threadIdx.x;
  double sum = 0;
  if (j < columns) {
    for (int64_t i = threadIdx.y; i < rows; i += kSumTile) sum += partial[i * columns + j];
  }
  scratch[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0) {
#pragma unroll 8
    for (int y = 1; y < kSumTile; ++y) sum += scratch[y][threadIdx.x];
  }
  __syncthreads();
  return sum;
}

// out[j] = Σ over rows of partial[·][j]. One block of (kSumTile, kSumTile) for each kSumTile columns.
template <class T>
__global__ void __launch_bounds__(kSumTile* kSumTile)
    sum_columns(const T* __restrict__ partial, int64_t rows, int64_t columns, T* __restrict__ out) {
  __shared__ double scratch[kSumTile][kSumTile + 1];
  const double sum = tile_column_sum(partial, rows, columns, scratch);
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kSumTile + threadIdx.x;
  if (threadIdx.y == 0 && j < columns) out[j] = static_cast<T>(sum);
}

// out = scale · Σ values [n]. One block of 1024 threads.
template <class T>
__global__ void __launch_bounds__(1024)
    sum_losses(const double* __restrict__ values, int64_t n, double scale, T* __restrict__ out) {
  __shared__ double scratch[32];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += 1024) sum += values[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *out = static_cast<T>(scale * sum);
}

// kVec neighbouring values, read and written by one instruction.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T v[kVec];
};

inline bool aligned_to(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace drot
