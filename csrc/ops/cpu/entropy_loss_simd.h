// The part of entropy_loss that is compiled for each instruction set (common/simd.h): one row.
#pragma once

#include <cstdint>

#include "common/simd.h"
#include "ops/cpu/float_rows.h"
#include "ops/entropy_loss_math.h"

namespace drot {

// A row of a matrix of type T, worked in Math = Wide<T>; every pointer is to [columns].
template <class T>
struct EntropyRow {
  using Math = Wide<T>;
  const T* y;
  const Math* m;  // or null, for 1
  int64_t columns;
  EntropyGroup<Math> row;       // of the row, zeros where rows have no entropy
  const Math* column_mean_log;  // of the columns, or null
  const Math* column_weight;
  const Math* logs;  // as entropy_row_sums left them, or null: taken again
  bool all_count;    // as it said
  T* dy;
  Math* dm;     // added to; null as m is
  bool stream;  // dy past the caches
};

// Z and T of one row, and whether every score counts.
struct EntropyRowSums {
  EntropySums<double> sums;
  bool all_count = true;
};

}  // namespace drot

// The sums of one row; logs [columns] gets what log_or_none gives. The row that is read next, or null, is
// fetched meanwhile: the logarithms leave the memory idle, the gradient does not.
DROT_SIMD_DECLARE(template <class T> EntropyRowSums entropy_row_sums(const T* y, const Wide<T>* m,
                                                                     int64_t columns, Wide<T>* logs,
                                                                     const T* next))

// The same without the logarithms; adds the row to Z and T of the columns.
DROT_SIMD_DECLARE(template <class T> EntropySums<double> entropy_add_row(const T* y, const Wide<T>* m,
                                                                         int64_t columns, Wide<T>* z,
                                                                         Wide<T>* t))

// dy of one row; dm += y²·∂L/∂s.
DROT_SIMD_DECLARE(template <class T> void entropy_row_gradient(const EntropyRow<T>& p))
