// The kernel of spectral_step and its launch: a whole step of one small orthogonal matrix by one block.
// tests/native compiles this file for a CPU too.
//
// The block keeps three bf16 matrices in shared memory. Every product has the form A Bᵀ, in which both
// operands are read by rows:
//
//   S = qᵀg - gᵀq     q and g are transposed when they are loaded
//   -x² = x xᵀ        x is skew-symmetric
//   h², x p           h and p are symmetric
//   changeᵀ           has -J, and the products qᵀq and J Jᵀ
//   q · change        has the transposed change that was stored
//
// Of S and of a product x p the elements above the diagonal are kept and mirrored. x is then skew-symmetric
// to the last bit. Without that the polynomials would multiply what rounding adds to x + xᵀ, and q would lose
// its orthogonality.
//
// A matrix is padded with zeros to kSide = 64 or 128 rows and columns. Padding stays apart: it is neither
// read from global memory nor written to it.
//
// The order of the columns in a product is chosen by what a lane loads at once, as in sparse24_mma.cuh: lane
// t of a row has 8 neighbouring columns, which are the operands of two mma of 16 columns.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cuda/static_shared.cuh"
#include "ops/polar_start_math.h"
#include "ops/skew_momentum_math.h"
#include "ops/spectral_step_math.h"

namespace drot {

// The arguments of one call; bf16 as bit patterns.
struct SpectralStepProblem {
  float* q;            // [count, n, n]
  uint16_t* momentum;  // [count, n, n]
  const float* gradient;
  const float* unit;   // [1]
  const float* angle;  // [2]
  int64_t count;
  int n;
  float decay;
  SpectralPolynomials polynomials;
};

// A bf16 matrix [kSide, kSide] in shared memory, in chunks of 8 columns. The chunks of a row are permuted by
// a number of the row, so that neither the loads of a product nor stores by rows or by columns conflict in
// a bank.
template <int kSide>
struct SharedMatrix {
  static constexpr int kChunks = kSide / 8;
  static constexpr int64_t kBytes = int64_t(kSide) * kSide * 2;

  uint4* chunks;

  __device__ uint4& chunk(int row, int at) const {
    return chunks[row * kChunks + (at ^ ((row & 1) << 2 | (row >> 1 & 3)))];
  }
  __device__ uint16_t& element(int row, int column) const {
    return reinterpret_cast<uint16_t*>(&chunk(row, column / 8))[column % 8];
  }
  // Columns `column` and column + 1, for an even column.
  __device__ uint32_t& pair(int row, int column) const {
    return reinterpret_cast<uint32_t*>(&chunk(row, column / 8))[column % 8 / 2];
  }
};

template <class E>
__device__ uint32_t packed_pair(float first, float second) {
  return E::from_float(first) | static_cast<uint32_t>(E::from_float(second)) << 16;
}

// The part of a product that a warp computes: 32 rows and half of the columns. Each warp of the block, which
// has 2 kSide threads, has another part.
template <class E, int kSide>
struct WarpTile {
  static constexpr int kRowBlocks = kSide / 32;
  static constexpr int kTiles = kSide / 16;  // tiles of 16 x 8 in half of the columns

  float sum[2][kTiles][4];
  int row, column;  // the first of the warp

  __device__ WarpTile() {
    const int warp = threadIdx.x / 32;
    row = warp % kRowBlocks * 32;
    column = warp / kRowBlocks * (kSide / 2);
    clear();
  }

  __device__ void clear() {
    each([](int, int, float& first, float& second) { first = second = 0; });
  }

  // Calls work(row, column, first, second) for the sums of this lane in (row, column) and (row, column + 1).
  template <class Work>
  __device__ void each(Work work) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          work(row + 16 * m + 8 * half + g, column + 8 * tile + 2 * t, sum[m][tile][2 * half],
               sum[m][tile][2 * half + 1]);
        }
      }
    }
  }

  // sum += a bᵀ.
  __device__ void add_product(SharedMatrix<kSide> a, SharedMatrix<kSide> b) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (int first = 0; first < kSide / 8; first += 4) {  // the same for all lanes, as mma requires
      const int at = first + t;
      uint4 left[2][2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        left[m][0] = a.chunk(row + 16 * m + g, at);
        left[m][1] = a.chunk(row + 16 * m + 8 + g, at);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 right = b.chunk(column + 8 * tile + g, at);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          E::multiply_dense(sum[m][tile], {left[m][0].x, left[m][1].x, left[m][0].y, left[m][1].y}, right.x,
                            right.y);
          E::multiply_dense(sum[m][tile], {left[m][0].z, left[m][1].z, left[m][0].w, left[m][1].w}, right.z,
                            right.w);
        }
      }
    }
  }

  // Stores a skew-symmetric matrix, whose element above the diagonal is value(row, column, sum).
  template <class Value>
  __device__ void store_skew(SharedMatrix<kSide> to, Value value) {
    const auto both = [&](int i, int j, float from) {
      if (i > j) return;
      const float x = i < j ? value(i, j, from) : 0.0f;
      to.element(i, j) = E::from_float(x);
      to.element(j, i) = E::from_float(-x);
    };
    each([&](int i, int j, float first, float second) {
      both(i, j, first);
      both(i, j + 1, second);
    });
  }

  // sum = a bᵀ.
  __device__ void product(SharedMatrix<kSide> a, SharedMatrix<kSide> b) {
    // Hides row and column from the compiler. It would otherwise compute the offsets and comparisons of all
    // sums before the loop over the polynomials, and keep them in 100 registers.
    asm volatile("" : "+r"(row), "+r"(column));
    clear();
    add_product(a, b);
  }

  // to = factor · sum + identity · 1, rounded once.
  __device__ void store(SharedMatrix<kSide> to, float factor, float identity) {
    each([&](int i, int j, float first, float second) {
      to.pair(i, j) = packed_pair<E>(factor * first + (i == j ? identity : 0.0f),
                                     factor * second + (i == j + 1 ? identity : 0.0f));
    });
  }
};

// to = factor · fromᵀ, padded with zeros. from: [n, n] in global memory. A lane reads 8 rows of a column.
template <class E, int kSide>
__device__ void load_transposed(const float* from, int n, float factor, SharedMatrix<kSide> to) {
  for (int at = threadIdx.x; at < kSide * (kSide / 8); at += 2 * kSide) {
    const int column = at % kSide, first = at / kSide * 8;
    float x[8] = {};
    if (column < n && first < n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = factor * from[(first + i) * n + column];
    }
    to.chunk(column, first / 8) = {packed_pair<E>(x[0], x[1]), packed_pair<E>(x[2], x[3]),
                                   packed_pair<E>(x[4], x[5]), packed_pair<E>(x[6], x[7])};
  }
}

// to = from, padded with zeros.
template <class E, int kSide>
__device__ void load(const float* from, int n, SharedMatrix<kSide> to) {
#pragma unroll 8
  for (int at = threadIdx.x; at < kSide * kSide; at += 2 * kSide) {
    const int row = at / kSide, column = at % kSide;
    to.element(row, column) = E::from_float(row < n && column < n ? from[row * n + column] : 0.0f);
  }
}

// The largest row sum of |sum| over the block, returned to every thread. sums: [2][kSide] in shared memory.
template <class E, int kSide>
__device__ float largest_row_sum(WarpTile<E, kSide>& tile, float (&sums)[2][kSide]) {
  const int lane = threadIdx.x % 32;
  float of_row[4] = {};  // rows lane / 4 + 8 i of the warp
  tile.each([&](int i, int, float first, float second) {
    of_row[(i - tile.row) / 8] += std::abs(first) + std::abs(second);
  });
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) of_row[i] += __shfl_xor_sync(0xffffffffu, of_row[i], step);
    if (lane % 4 == 0) sums[tile.column > 0][tile.row + 8 * i + lane / 4] = of_row[i];
  }
  __syncthreads();
  float largest = 0;
  for (int i = lane; i < kSide; i += 32) largest = larger_or_nan(sums[0][i] + sums[1][i], largest);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = larger_or_nan(__shfl_xor_sync(0xffffffffu, largest, step), largest);
  }
  return largest;
}

// x = the polar factor of the skew-symmetric x. The three matrices change their places.
template <class E, int kSide>
__device__ void polar_factor(const SpectralPolynomials& polynomials, WarpTile<E, kSide>& tile,
                             float (&sums)[2][kSide], SharedMatrix<kSide>& x, SharedMatrix<kSide>& second,
                             SharedMatrix<kSide>& third) {
  const auto multiply_x = [&](SharedMatrix<kSide> by, SharedMatrix<kSide>& to) {
    tile.product(x, by);
    tile.store_skew(to, [](int, int, float element) { return element; });
    __syncthreads();
    const SharedMatrix<kSide> old = x;
    x = to;
    to = old;
  };
  tile.product(x, x);
  tile.store(second, 1, 0);
  __syncthreads();
  tile.product(second, second);
  const float scale = polar_scale(largest_row_sum(tile, sums), polynomials.first.margin);
  tile.each([&](int i, int j, float fourth, float next) {
    const uint32_t squared = second.pair(i, j);  // of -x²
    third.pair(i, j) = packed_pair<E>(
        polar_element(polynomials.first, scale, -E::to_float(static_cast<uint16_t>(squared)), fourth, i == j),
        polar_element(polynomials.first, scale, -E::to_float(static_cast<uint16_t>(squared >> 16)), next,
                      i == j + 1));
  });
  __syncthreads();
  multiply_x(third, second);
#pragma unroll 1
  for (int k = 0; k < polynomials.further_count; ++k) {
    const FurtherPolynomial p = polynomials.further[k];
    tile.product(x, x);
    if (p.root != 0) {
      tile.store(second, p.root, p.middle);
      __syncthreads();
      tile.product(second, second);
    }
    tile.store(third, p.factor, p.constant);
    __syncthreads();
    multiply_x(third, second);
  }
}

// E: Bf16Element of sparse24_mma.cuh. One block of 2 kSide threads for each matrix.
template <class E, int kSide>
__global__ void __launch_bounds__(2 * kSide, 1) spectral_step(SpectralStepProblem p) {
  extern __shared__ uint4 dynamic_shared[];
  __shared__ float sums[2][kSide];
  static_assert(sizeof(sums) <= kStaticShared);
  constexpr int kChunks = kSide * SharedMatrix<kSide>::kChunks;
  SharedMatrix<kSide> x{dynamic_shared};
  SharedMatrix<kSide> second{dynamic_shared + kChunks}, third{dynamic_shared + 2 * kChunks};
  const int n = p.n;
  const int64_t matrix = static_cast<int64_t>(blockIdx.x) * n * n;
  float* q = p.q + matrix;
  uint16_t* momentum = p.momentum + matrix;
  WarpTile<E, kSide> tile;

  load_transposed<E>(q, n, 1.0f, second);
  load_transposed<E>(p.gradient + matrix, n, *p.unit, third);
  __syncthreads();
  tile.product(third, second);
  tile.each([](int, int, float& first, float& next) { first = -first, next = -next; });
  tile.add_product(second, third);
  tile.store_skew(x, [&](int i, int j, float s) {
    if (j >= n) return 0.0f;
    float m = E::to_float(momentum[i * n + j]);
    const float u = nesterov_sum(s, p.decay, m);
    momentum[i * n + j] = E::from_float(m);
    return u;
  });
  __syncthreads();

  polar_factor(p.polynomials, tile, sums, x, second, third);

  // changeᵀ = ½ (1 - qᵀq) + angle[0] Jᵀ + angle[1] J², where J² is -J Jᵀ
  load_transposed<E>(q, n, 1.0f, second);
  __syncthreads();
  const float linear = p.angle[0], square = p.angle[1];
  tile.product(x, x);
  tile.each([&](int, int, float& first, float& next) { first *= 2 * square, next *= 2 * square; });
  tile.add_product(second, second);
  tile.each([&](int i, int j, float& first, float& next) {
    const uint32_t pair = x.pair(i, j);
    first = -0.5f * first - linear * E::to_float(static_cast<uint16_t>(pair));
    next = -0.5f * next - linear * E::to_float(static_cast<uint16_t>(pair >> 16));
  });
  tile.store(third, 1, 0.5f);
  __syncthreads();
  load<E>(q, n, second);
  __syncthreads();
  tile.product(second, third);
  tile.each([&](int i, int j, float first, float next) {
    if (i >= n || j >= n) return;  // n is even
    q[i * n + j] += first;
    q[i * n + j + 1] += next;
  });
}

// launcher: a Launcher (common/cuda/launcher.cuh). p.count is at least 1.
template <class E, class LauncherT>
void run_spectral_step(LauncherT& launcher, const SpectralStepProblem& p) {
  const auto launch = [&](auto kernel, int side, int64_t bytes) {
    launcher.launch(kernel, dim3(static_cast<unsigned>(p.count)), dim3(2 * side), 3 * bytes, p);
  };
  if (p.n <= 64) {
    launch(&spectral_step<E, 64>, 64, SharedMatrix<64>::kBytes);
  } else {
    launch(&spectral_step<E, 128>, 128, SharedMatrix<128>::kBytes);
  }
}

}  // namespace drot
