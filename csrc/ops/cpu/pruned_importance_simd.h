// The part of the CPU kernel of pruned_importance that is compiled for each instruction set
// (common/cpu/simd.h): one row.
#pragma once

#include <cstdint>

#include "common/cpu/float_rows.h"
#include "common/cpu/simd.h"
#include "common/selection_math.h"

namespace drot {

// A row of a matrix of type T and its results. Every pointer is to [columns].
template <class T>
struct PrunedRow {
  using Math = Wide<T>;
  const T* y;
  const Math* column_scale;
  int64_t columns, prune, group;  // group > 0, or 0: the whole row
  Math scale;                     // factor of the loss
  OrderedKey<Math>* key;          // scratch, where group is 0
  T* dy;
  Math* dcolumn_scale;  // the row is added to it; or null
  bool stream;          // dy is written with non-temporal stores
};

}  // namespace drot

// Returns Σ of the removed scores, NaN where a score of the row is not finite. Writes dy, adds to
// dcolumn_scale.
DROT_SIMD_DECLARE(template <class T> double prune_row(const PrunedRow<T>& p))
