// The part of pruned_importance that is compiled for each instruction set (common/simd.h): one row.
#pragma once

#include <cstdint>

#include "common/selection_math.h"
#include "common/simd.h"
#include "ops/cpu/float_rows.h"

namespace drot {

// A row of a matrix of type T, worked in Math = Wide<T>; every pointer is to [columns].
template <class T>
struct PrunedRow {
  using Math = Wide<T>;
  const T* y;
  const Math* m;
  int64_t columns, prune, group;  // group > 0, or 0: the whole row
  Math scale;
  OrderedKey<Math>* key;  // scratch, where group is 0
  T* dy;
  Math* dm;     // added to; or null
  bool stream;  // dy past the caches
};

}  // namespace drot

// Returns Σ of the removed scores, NaN where a score of the row is not finite; writes dy, adds to dm.
DROT_SIMD_DECLARE(template <class T> double prune_row(const PrunedRow<T>& p))
