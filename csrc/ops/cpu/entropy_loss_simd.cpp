#include "ops/cpu/entropy_loss_simd.h"

#include "common/score_math.h"

namespace drot::DROT_SIMD {
namespace {

template <bool kColumns, class T>
DROT_HOST_DEVICE EntropySums<double> row_sums(const T* y, const Wide<T>* m, int64_t columns, Wide<T>* first,
                                              Wide<T>* second) {
  using Math = Wide<T>;
  EntropySums<double> sums;
  Math buffer[kBlock];
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t width = columns - start < kBlock ? columns - start : kBlock;
    const Math* w = load_block(y + start, width, buffer);
    const Math* factor = m + start;
    Math* a = first + start;
    Math* b = second + start;
    Math z = 0, t = 0;
#pragma omp simd reduction(+ : z, t)
    for (int64_t j = 0; j < width; ++j) {
      const Math score = score_of(w[j], factor[j]), log = log_or_none(score);
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
    const Math* m = p.m + start;
    const Math* logs = p.logs + (kLogs ? start : 0);
    const Math* mean_log = p.column_mean_log + (kColumns ? start : 0);
    const Math* weight = p.column_weight + (kColumns ? start : 0);
    Math* dm = p.dm + (kFactor ? start : 0);
    const EntropyGroup<Math> row = p.row;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const Math part = w[j] * m[j], log = kLogs ? logs[j] : log_or_none(score_of(w[j], m[j]));
      Math ds = entropy_slope(log, row);
      if (kColumns) ds += entropy_slope(log, EntropyGroup<Math>{mean_log[j], weight[j]});
      out[j] = 2 * part * ds;
      if (kFactor) dm[j] += w[j] * (w[j] * ds);
    }
    if (p.next) fetch_block(p.next + start, width);
    store_block(out, width, p.dy + start, p.stream);
  }
  finish_stores();
}

}  // namespace

template <class T>
EntropySums<double> entropy_row_sums(const T* y, const Wide<T>* m, int64_t columns, Wide<T>* logs) {
  return row_sums<false>(y, m, columns, logs, logs);
}

template <class T>
EntropySums<double> entropy_add_row(const T* y, const Wide<T>* m, int64_t columns, Wide<T>* z, Wide<T>* t) {
  return row_sums<true>(y, m, columns, z, t);
}

template <class T>
void entropy_row_gradient(const EntropyRow<T>& p) {
  if (p.logs) {
    p.dm ? row_gradient<false, true, true>(p) : row_gradient<false, true, false>(p);
  } else {
    p.dm ? row_gradient<true, false, true>(p) : row_gradient<true, false, false>(p);
  }
}

#define DROT_INSTANTIATE(T)                                                                            \
  template EntropySums<double> entropy_row_sums(const T*, const Wide<T>*, int64_t, Wide<T>*);          \
  template EntropySums<double> entropy_add_row(const T*, const Wide<T>*, int64_t, Wide<T>*, Wide<T>*); \
  template void entropy_row_gradient(const EntropyRow<T>&);
DROT_INSTANTIATE(float)
DROT_INSTANTIATE(double)
DROT_INSTANTIATE(Bf16)
DROT_INSTANTIATE(Fp16)

}  // namespace drot::DROT_SIMD
