// The kernel of turn_start and its launch. tests/native compiles this file for a CPU too.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/stack_tile.cuh"
#include "ops/turn_start_math.h"

namespace drot {

// j, change and scaled: `count` matrices [n, n]; angle: the factors of j in change and in scaled; scale: the
// factor of each matrix of j, `stride` elements apart, or null for 1.
struct TurnStartProblem {
  const c10::BFloat16* j;
  const float* angle;
  const c10::BFloat16* scale;
  int64_t stride;
  c10::BFloat16 *change, *scaled;
  int64_t count, n;
};

// kVec divides n.
template <int kVec>
__global__ void __launch_bounds__(kStackThreads) turn_start_tiles(TurnStartProblem p) {
  const StackTile<kVec> tile(p.n, p.n);
  if (!tile.inside) return;
  const float scale = p.scale ? static_cast<float>(p.scale[tile.matrix * p.stride]) : 1.0f;
  const float factor = scale * p.angle[0], second_factor = scale * scale * p.angle[1];
#pragma unroll 4
  for (int64_t row = tile.first; row < tile.last; row += tile.kStep) {
    const int64_t at = (tile.matrix * p.n + row) * p.n + tile.column;
    const auto j = load_aligned<c10::BFloat16, kVec>(p.j + at, true);
    AlignedVector<c10::BFloat16, kVec> change, scaled;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      change.set(v, turn_change(factor, j.get(v), row == tile.column + v));
      scaled.set(v, second_factor * static_cast<float>(j.get(v)));
    }
    store_global(p.change + at, change);
    store_global(p.scaled + at, scaled);
  }
}

template <class LauncherT>
void run_turn_start(LauncherT& launcher, const TurnStartProblem& p) {
  constexpr int kVec = kVectorSize<c10::BFloat16>;
  const bool vectors = p.n % kVec == 0 && is_aligned(p.j) && is_aligned(p.change) && is_aligned(p.scaled);
  launcher.launch(vectors ? turn_start_tiles<kVec> : turn_start_tiles<1>,
                  dim3(stack_tiles(p.count, p.n, p.n)), dim3(kStackThreads), 0, p);
}

}  // namespace drot
