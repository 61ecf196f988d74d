// The part of sparsegpt_sweep that is compiled for each instruction set (common/simd.h).
#pragma once

#include <cstdint>

#include "common/selection_math.h"
#include "common/simd.h"

namespace drot {

// Rows that one tile sweeps side by side: four AVX2 registers.
template <class T>
constexpr int kSweepLanes = 128 / sizeof(T);

// A tile of rows, transposed: w, err and removed (0 or 1) are [columns][kSweepLanes].
template <class T>
struct SweepTile {
  const T* factor;  // Uᵀ [columns, columns]: the factors of one column lie side by side
  int64_t columns;
  bool choose;  // n:m is chosen here; else removed is given
  int prune, group;
  T* w;
  T* err;
  OrderedKey<T>* removed;
};

}  // namespace drot

DROT_SIMD_DECLARE(template <class T> void sweep_tile(const SweepTile<T>& p))
