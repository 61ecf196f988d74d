// The kernel of skew_momentum and its launch. tests/native compiles this file for a CPU too.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "ops/skew_momentum_math.h"

namespace drot {

constexpr int kTileSide = 32, kTileThreadRows = 8;

// product, momentum and out: `count` matrices [n, n] each. adam: whether Adam's squares lie below the
// diagonal of the momentum.
struct SkewMomentumProblem {
  const c10::BFloat16* product;
  c10::BFloat16 *momentum, *out;
  int64_t count, n;
  float decay;
  bool adam;
  float square_decay;
};

// A block reads a tile on or above the diagonal and its mirror image, and writes both, so that every element
// is read once, in whole sectors of a cache line. Blocks below the diagonal have nothing to do.
template <bool kAdam>
__global__ void __launch_bounds__(kTileSide* kTileThreadRows)
    skew_momentum_tiles(SkewMomentumProblem p, int64_t tiles) {
  __shared__ float upper[kTileSide][kTileSide + 1], lower[kTileSide][kTileSide + 1];
  __shared__ float squares[kAdam ? kTileSide : 1][kTileSide + 1];  // of the lower tile
  const int64_t block = blockIdx.x, tile = block % (tiles * tiles);
  const int64_t row = tile / tiles * kTileSide, column = tile % tiles * kTileSide;
  if (column < row) return;
  const int64_t matrix = block / (tiles * tiles) * p.n * p.n;
  const int x = threadIdx.x;
  for (int y = threadIdx.y; y < kTileSide; y += kTileThreadRows) {
    if (row + y < p.n && column + x < p.n) upper[y][x] = p.product[matrix + (row + y) * p.n + column + x];
    if (column + y < p.n && row + x < p.n) {
      const int64_t at = matrix + (column + y) * p.n + row + x;
      lower[y][x] = p.product[at];
      if constexpr (kAdam) {
        if (row + x < column + y) squares[y][x] = p.momentum[at];
      }
    }
  }
  __syncthreads();
  for (int y = threadIdx.y; y < kTileSide; y += kTileThreadRows) {
    if (row + y < p.n && column + x < p.n && row + y <= column + x) {
      const int64_t at = matrix + (row + y) * p.n + column + x;
      float u = upper[y][x] - lower[x][y];
      if (row + y < column + x) {
        if constexpr (kAdam) {
          u = adam_ratio(u, p.decay, p.square_decay, p.momentum[at], squares[x][y]);
        } else {
          u = nesterov_sum(u, p.decay, p.momentum[at]);
        }
      }
      p.out[at] = u;
      upper[y][x] = u;
    }
  }
  __syncthreads();
  for (int y = threadIdx.y; y < kTileSide; y += kTileThreadRows) {
    if (column + y < p.n && row + x < p.n && row + x < column + y) {
      const int64_t at = matrix + (column + y) * p.n + row + x;
      p.out[at] = -upper[x][y];
      if constexpr (kAdam) p.momentum[at] = squares[y][x];
    }
  }
}

template <class LauncherT>
void run_skew_momentum(LauncherT& launcher, const SkewMomentumProblem& problem) {
  const int64_t tiles = (problem.n + kTileSide - 1) / kTileSide;
  const auto launch = [&](auto kernel) {
    launcher.launch(kernel, dim3(static_cast<unsigned>(problem.count * tiles * tiles)),
                    dim3(kTileSide, kTileThreadRows), 0, problem, tiles);
  };
  problem.adam ? launch(&skew_momentum_tiles<true>) : launch(&skew_momentum_tiles<false>);
}

}  // namespace drot
