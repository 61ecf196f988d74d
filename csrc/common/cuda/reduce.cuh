// Sums over a warp, over a block and over the rows of a matrix of partial sums, each in a fixed order, so
// that results repeat bit for bit. Used by the kernels of entropy_loss and pruned_importance.
#pragma once

#include <cstdint>

namespace drot {

// Σ x over the lanes of a warp, returned to every lane.
template <class T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// kN sums at once, kN a power of 2: a lane gets the sum of x[lane / (32 / kN)] over the warp. Each shuffle
// step halves the number of sums that a lane carries, so that 8 sums take 9 shuffles instead of 40.
template <int kN, class T>
__device__ T warp_sums(T (&x)[kN]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = kN / 2; n > 0; n /= 2) {
    const int step = 32 * n / kN;
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const T given = upper ? x[i] : x[i + n], kept = upper ? x[i + n] : x[i];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, step);
    }
  }
#pragma unroll
  for (int step = 16 / kN; step > 0; step /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], step);
  return x[0];
}

// The sum over all threads of a one-dimensional block of whole warps, returned to every thread. Every thread
// must call it. scratch: 32 values in shared memory, which may be reused at once.
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

constexpr int kSlice = 8;  // columns of a thread that sum_over_warps adds in one pass

// out[lane · each + i] = Σ over the warps of x[i] of this lane, i < each. Every thread must call it.
//
// Args:
//   x: values of kN columns of a thread.
//   each: columns that a thread has, at most kN.
//   scratch: shared memory, which may be reused at once.
//   out: [width].
//   width: at most 32 · each; sums beyond it are dropped.
template <int kWarps, int kN, class T>
__device__ void sum_over_warps(const T (&x)[kN], int each, T (&scratch)[kWarps][kSlice][32], T* out,
                               int64_t width) {
  static_assert(kWarps >= kSlice);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int base = 0; base < kN; base += kSlice) {
#pragma unroll
    for (int i = base; i < base + kSlice && i < kN; ++i) scratch[warp][i - base][lane] = x[i];
    __syncthreads();
    const int64_t column = lane * each + base + warp;
    if (warp < kSlice && base + warp < each && column < width) {
      T sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += scratch[w][warp][lane];
      out[column] = sum;
    }
    __syncthreads();
  }
}

constexpr int kSumTile = 32;

// Σ_i partial[i][blockIdx.x · kSumTile + threadIdx.x], in double, for partial [rows, columns]. The block has
// kSumTile × kSumTile threads, and every thread must call it. Threads with threadIdx.y = 0 get the sum.
template <class T>
__device__ double tile_column_sum(const T* __restrict__ partial, int64_t rows, int64_t columns,
                                  double (&scratch)[kSumTile][kSumTile + 1]) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kSumTile + threadIdx.x;
  double sum = 0;
  if (j < columns) {
#pragma unroll 4
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

// out[j] = Σ_i partial[i][j]. One block of kSumTile × kSumTile threads for each kSumTile columns.
template <class T>
__global__ void __launch_bounds__(kSumTile* kSumTile)
    sum_columns(const T* __restrict__ partial, int64_t rows, int64_t columns, T* __restrict__ out) {
  __shared__ double scratch[kSumTile][kSumTile + 1];
  const double sum = tile_column_sum(partial, rows, columns, scratch);
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kSumTile + threadIdx.x;
  if (threadIdx.y == 0 && j < columns) out[j] = static_cast<T>(sum);
}

// out = scale · Σ_i values[i], i < n. One block of 1024 threads.
template <class T>
__global__ void __launch_bounds__(1024)
    sum_losses(const double* __restrict__ values, int64_t n, double scale, T* __restrict__ out) {
  __shared__ double scratch[32];
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < n; i += 1024) sum += values[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *out = static_cast<T>(scale * sum);
}

template <class LauncherT, class T>
void launch_sum_columns(LauncherT& launcher, const T* partial, int64_t rows, int64_t columns, T* out) {
  launcher.launch(sum_columns<T>, dim3((columns + kSumTile - 1) / kSumTile), dim3(kSumTile, kSumTile), 0,
                  partial, rows, columns, out);
}

template <class LauncherT, class T>
void launch_sum_losses(LauncherT& launcher, const double* values, int64_t n, double scale, T* out) {
  launcher.launch(sum_losses<T>, dim3(1), dim3(1024), 0, values, n, scale, out);
}

}  // namespace drot
