#include "ops/cpu/entropy_loss_simd.h"

namespace drot::DROT_SIMD {
namespace {

// w·m, or w where no factor is given.
template <bool kFactor, class Math>
DROT_HOST_DEVICE Math weighted(Math w, const Math* m, int64_t j) {
  return kFactor ? w * m[j] : w;
}

template <bool kColumns, bool kFactor, class T>
DROT_HOST_DEVICE EntropySums<double> row_sums(const T* y, const Wide<T>* m, int64_t columns, Wide<T>* first,
                                              Wide<T>* second, const T* next) {
  using Math = Wide<T>;
  EntropySums<double> sums;
  Math buffer[kBlock];
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t width = columns - start < kBlock ? columns - start : kBlock;
    const Math* w = load_block(y + start, width, buffer);
    if (next) fetch_block(next + start, width);
    const Math* factor = m + (kFactor ? start : 0);
    Math* a = first + start;
    Math* b = second + start;
    Math z = 0, t = 0;
#pragma omp simd reduction(+ : z, t)
    for (int64_t j = 0; j < width; ++j) {
      const Math score = w[j] * weighted<kFactor>(w[j], factor, j), log = log_or_none(score);
      const Math s = counted_score(score), product = s * log;
      z += s;
      t += product;
      if (kColumns) {
        a[j] += s;
        b[j] += product;
      } else {
        a[j] = log;
      }
    }
    sums.z += z;
    sums.t += t;
  }
  return sums;
}

template <bool kColumns, bool kLogs, bool kFactor, class T>
DROT_HOST_DEVICE void row_gradient(const EntropyRow<T>& p) {
  using Math = Wide<T>;
  Math buffer[kBlock], out[kBlock];
  for (int64_t start = 0; start < p.columns; start += kBlock) {
    const int64_t width = p.columns - start < kBlock ? p.columns - start : kBlock;
    const Math* w = load_block(p.y + start, width, buffer);
    const Math* m = p.m + (kFactor ? start : 0);
    const Math* logs = p.logs + (kLogs ? start : 0);
    const Math* mean_log = p.column_mean_log + (kColumns ? start : 0);
    const Math* weight = p.column_weight + (kColumns ? start : 0);
    Math* dm = p.dm + (kFactor ? start : 0);
    const EntropyGroup<Math> row = p.row;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const Math part = weighted<kFactor>(w[j], m, j), log = kLogs ? logs[j] : log_or_none(w[j] * part);
      Math ds = entropy_slope(log, row);
      if (kColumns) ds += entropy_slope(log, EntropyGroup<Math>{mean_log[j], weight[j]});
      out[j] = 2 * part * ds;
      if (kFactor) dm[j] += w[j] * (w[j] * ds);
    }
    store_block(out, width, p.dy + start, p.stream);
  }
  finish_stores();
}

}  // namespace

template <class T>
EntropySums<double> entropy_row_sums(const T* y, const Wide<T>* m, int64_t columns, Wide<T>* logs,
                                     const T* next) {
  return m ? row_sums<false, true>(y, m, columns, logs, logs, next)
           : row_sums<false, false>(y, m, columns, logs, logs, next);
}

template <class T>
EntropySums<double> entropy_add_row(const T* y, const Wide<T>* m, int64_t columns, Wide<T>* z, Wide<T>* t) {
  const T* next = nullptr;
  return m ? row_sums<true, true>(y, m, columns, z, t, next)
           : row_sums<true, false>(y, m, columns, z, t, next);
}

template <class T>
void entropy_row_gradient(const EntropyRow<T>& p) {
  if (p.logs) {
    p.m ? row_gradient<false, true, true>(p) : row_gradient<false, true, false>(p);
  } else {
    p.m ? row_gradient<true, false, true>(p) : row_gradient<true, false, false>(p);
  }
}

#define DROT_INSTANTIATE(T)                                                                             \
  template EntropySums<double> entropy_row_sums(const T*, const Wide<T>*, int64_t, Wide<T>*, const T*); \
  template EntropySums<double> entropy_add_row(const T*, const Wide<T>*, int64_t, Wide<T>*, Wide<T>*);  \
  template void entropy_row_gradient(const EntropyRow<T>&);
DROT_INSTANTIATE(float)
DROT_INSTANTIATE(double)
DROT_INSTANTIATE(Bf16)
DROT_INSTANTIATE(Fp16)

}  // namespace drot::DROT_SIMD
