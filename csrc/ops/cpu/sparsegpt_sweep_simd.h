// The part of the CPU kernel of sparsegpt_sweep that is compiled for each instruction set
// (common/cpu/simd.h): a tile of rows.
#pragma once

#include <cstdint>

#include "common/cpu/simd.h"
#include "common/selection_math.h"

namespace drot {

// Rows of a tile, one in each lane: four AVX2 registers.
template <class T>
constexpr int kSweepLanes = 128 / sizeof(T);

// A transposed tile: w, err and removed (0 or 1) are [columns][kSweepLanes].
template <class T>
struct SweepTile {
  const T* factor;  // Uᵀ [columns, columns], U = Hinv: the factors of one column are contiguous
  int64_t columns;
  bool choose;  // whether sweep_tile chooses the mask; else removed is given
  int prune, group;
  T* w;
  T* err;
  OrderedKey<T>* removed;
};

}  // namespace drot

// Sweeps all columns of a tile: replaces w, writes err and, where it chooses the mask, removed.
DROT_SIMD_DECLARE(template <class T> void sweep_tile(const SweepTile<T>& p))
