// The part of the CPU kernel of entropy_loss that is compiled for each instruction set (common/cpu/simd.h):
// one row.
#pragma once

#include <cstdint>

#include "common/cpu/float_rows.h"
#include "common/cpu/simd.h"
#include "ops/entropy_loss_math.h"

namespace drot {

// A row of a matrix of type T, and what its gradient needs. Every pointer is to [columns].
template <class T>
struct EntropyRow {
  using Math = Wide<T>;
  const T* y;
  const Math* column_scale;  // or null, for 1
  int64_t columns;
  EntropyGroup<Math> row;       // sums of the row; zeros where only columns have an entropy
  const Math* column_mean_log;  // values of the columns; null where only rows have an entropy
  const Math* column_weight;
  const Math* logs;  // from entropy_row_sums, or null: computed again
  bool all_count;    // from entropy_row_sums
  T* dy;
  Math* dcolumn_scale;  // the row is added to it; null where column_scale is
  bool stream;          // dy is written with non-temporal stores
};

// Z and T of one row, and whether no score counts as 0.
struct EntropyRowSums {
  EntropySums<double> sums;
  bool all_count = true;
};

}  // namespace drot

// The sums of one row; logs [columns] = log_or_none of the scores. `next`, the row to be read next or null,
// is prefetched here, because the memory is idle during the logarithms and busy during the gradient.
DROT_SIMD_DECLARE(template <class T> EntropyRowSums entropy_row_sums(const T* y, const Wide<T>* column_scale,
                                                                     int64_t columns, Wide<T>* logs,
                                                                     const T* next))

// The sums of one row, without its logarithms. Adds the row to z, t [columns], Z and T of the columns.
DROT_SIMD_DECLARE(template <class T> EntropySums<double> entropy_add_row(
    const T* y, const Wide<T>* column_scale, int64_t columns, Wide<T>* z, Wide<T>* t))

// Writes dy of one row; dcolumn_scale += y² · ∂loss/∂s.
DROT_SIMD_DECLARE(template <class T> void entropy_row_gradient(const EntropyRow<T>& p))
