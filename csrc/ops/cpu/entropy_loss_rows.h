// The loops of entropy_loss over one row, for any dtype T of y and the type Math it is worked in.
//
// logs[j] is log s_j, or kNoLog where the score counts as 0: below the smallest normal number of Math.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/score_math.h"
#include "ops/entropy_loss_math.h"

namespace drot {

// Lower than the logarithm of any score.
constexpr double kNoLog = -1e30;

template <class T, class Math>
EntropySums<Math> row_logs(const T* y, const Math* m, int64_t columns, Math* logs) {
  EntropySums<Math> sums;
  for (int64_t j = 0; j < columns; ++j) {
    const Math s = score_of(static_cast<Math>(y[j]), m ? m[j] : Math(1));
    const bool counts = s >= std::numeric_limits<Math>::min();
    const Math log = std::log(counts ? s : Math(1));
    logs[j] = counts ? log : Math(kNoLog);
    sums.z += s;
    sums.t += counts ? s * log : Math(0);
  }
  return sums;
}

// Adds one row to the sums of the columns.
template <class T, class Math>
void add_to_columns(const T* y, const Math* m, const Math* logs, int64_t columns, Math* z, Math* t) {
  for (int64_t j = 0; j < columns; ++j) {
    const Math s = score_of(static_cast<Math>(y[j]), m ? m[j] : Math(1));
    z[j] += s;
    t[j] += logs[j] > Math(kNoLog) ? s * logs[j] : Math(0);
  }
}

// dy of one row; dm += y²·∂L/∂s. slope, shift: of the columns, or null.
template <class T, class Math>
void row_gradient(const T* y, const Math* m, const Math* logs, int64_t columns, EntropyGradient<Math> row,
                  const Math* slope, const Math* shift, T* dy, Math* dm) {
  for (int64_t j = 0; j < columns; ++j) {
    const Math w = static_cast<Math>(y[j]), factor = m ? m[j] : Math(1);
    const Math a = row.slope + (slope ? slope[j] : Math(0)), b = row.shift + (shift ? shift[j] : Math(0));
    const Math ds = logs[j] > Math(kNoLog) ? a * logs[j] + b : Math(0);
    dy[j] = static_cast<T>(2 * (w * factor) * ds);
    if (dm) dm[j] += w * (w * ds);
  }
}

}  // namespace drot
