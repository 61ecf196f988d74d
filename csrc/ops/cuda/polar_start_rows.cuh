// The kernels of polar_start and their launch. tests/native compiles this file for a CPU too.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/reduce.cuh"
#include "ops/polar_start_math.h"

namespace drot {

constexpr int kPolarThreads = 256, kPolarRows = 16;  // rows of a block of polar_start_rows

// squared, fourth and out: `count` matrices [n, n] each.
struct PolarStartProblem {
  const c10::BFloat16 *squared, *fourth;
  c10::BFloat16* out;
  int64_t count, n;
  PolarCoefficients k;
};

// sums[row] = Σ |fourth[row][j]|, one block for each row of all matrices. kVec divides n.
template <int kVec>
__global__ void __launch_bounds__(kPolarThreads)
    polar_row_sums(PolarStartProblem p, float* __restrict__ sums) {
  __shared__ float scratch[32];
  const c10::BFloat16* row = p.fourth + blockIdx.x * p.n;
  float sum = 0;
  for (int64_t j = threadIdx.x * kVec; j < p.n; j += kPolarThreads * kVec) {
    const auto x = load_aligned<c10::BFloat16, kVec>(row + j, true);
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum += std::abs(static_cast<float>(x.get(v)));
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The largest of values[0 … n), returned to every thread of the block. scratch: kPolarThreads values.
__device__ inline float largest_or_nan(const float* __restrict__ values, int64_t n, float* scratch) {
  float largest = 0;
  for (int64_t i = threadIdx.x; i < n; i += kPolarThreads) largest = larger_or_nan(values[i], largest);
  scratch[threadIdx.x] = largest;
  __syncthreads();
  for (int half = kPolarThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      scratch[threadIdx.x] = larger_or_nan(scratch[threadIdx.x], scratch[threadIdx.x + half]);
    }
    __syncthreads();
  }
  return scratch[0];
}

// The polynomial for kPolarRows rows of a matrix. The largest row sum of the matrix is found by each of its
// blocks, which costs less than a launch. kVec divides n.
template <int kVec>
__global__ void __launch_bounds__(kPolarThreads)
    polar_start_rows(PolarStartProblem p, int64_t blocks, const float* __restrict__ sums) {
  __shared__ float scratch[kPolarThreads];
  const int64_t matrix = blockIdx.x / blocks, first = blockIdx.x % blocks * kPolarRows;
  const float scale = polar_scale(largest_or_nan(sums + matrix * p.n, p.n, scratch), p.k.margin);
  const int64_t last = first + kPolarRows < p.n ? first + kPolarRows : p.n;
  for (int64_t at = first * p.n + threadIdx.x * kVec; at < last * p.n; at += kPolarThreads * kVec) {
    const int64_t row = at / p.n, column = at % p.n, start = matrix * p.n * p.n + at;
    const auto squared = load_aligned<c10::BFloat16, kVec>(p.squared + start, true);
    const auto fourth = load_aligned<c10::BFloat16, kVec>(p.fourth + start, true);
    AlignedVector<c10::BFloat16, kVec> out;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      out.set(v, polar_element(p.k, scale, squared.get(v), fourth.get(v), row == column + v));
    }
    store_aligned(p.out + start, out);
  }
}

// The pointers are aligned to 16 bytes.
template <int kVec, class LauncherT>
void launch_polar_start(LauncherT& launcher, const PolarStartProblem& p) {
  float* sums = launcher.template allocate<float>(p.count * p.n);
  launcher.launch(polar_row_sums<kVec>, dim3(p.count * p.n), dim3(kPolarThreads), 0, p, sums);
  const int64_t blocks = (p.n + kPolarRows - 1) / kPolarRows;
  launcher.launch(polar_start_rows<kVec>, dim3(p.count * blocks), dim3(kPolarThreads), 0, p, blocks, sums);
}

template <class LauncherT>
void run_polar_start(LauncherT& launcher, const PolarStartProblem& p) {
  if (p.n % kVectorSize<c10::BFloat16> == 0) {
    launch_polar_start<kVectorSize<c10::BFloat16>>(launcher, p);
  } else {
    launch_polar_start<1>(launcher, p);
  }
}

}  // namespace drot
