#include "ops/cpu/entropy_loss_simd.h"

namespace drot::DROT_SIMD {
namespace {

// The bits of a score >= 0 as an integer, which has the order of the scores; NaN is the largest.
DROT_HOST_DEVICE int32_t order_of(float score) { return static_cast<int32_t>(bits_of(score)); }
DROT_HOST_DEVICE int64_t order_of(double score) {
  int64_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits;
}

// w · column_scale, or w where there is none.
template <bool kColumnScale, class Math>
DROT_HOST_DEVICE Math weighted(Math w, const Math* column_scale, int64_t j) {
  return kColumnScale ? w * column_scale[j] : w;
}

// Adds a block to the sums of its row, and writes the logarithms. kAll: assumes that no score counts as 0,
// which saves a few of two dozen instructions. Where one does, nothing is added and the result is false.
template <bool kColumnScale, bool kAll, class Math>
DROT_HOST_DEVICE bool block_sums(const Math* w, const Math* column_scale, int64_t width, Math* logs,
                                 EntropySums<double>& sums) {
  Math z = 0, t = 0;
  auto low = order_of(smallest_score(Math{}));
#pragma omp simd reduction(+ : z, t) reduction(min : low)
  for (int64_t j = 0; j < width; ++j) {
    const Math score = w[j] * weighted<kColumnScale>(w[j], column_scale, j);
    const Math log = kAll ? log_normal(score) : log_or_none(score), s = kAll ? score : counted_score(score);
    const auto order = order_of(score);
    if (kAll) low = order < low ? order : low;
    z += s;
    t += s * log;
    logs[j] = log;
  }
  if (low < order_of(smallest_score(Math{}))) return false;
  sums.z += z;
  sums.t += t;
  return true;
}

template <bool kColumnScale, class T>
DROT_HOST_DEVICE EntropyRowSums row_sums(const T* y, const Wide<T>* column_scale, int64_t columns,
                                         Wide<T>* logs, const T* next) {
  using Math = Wide<T>;
  EntropyRowSums out;
  Math buffer[kBlock];
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t width = columns - start < kBlock ? columns - start : kBlock;
    const Math* w = load_block(y + start, width, buffer);
    if (next) prefetch_block(next + start, width);
    const Math* scale = column_scale + (kColumnScale ? start : 0);
    if (!block_sums<kColumnScale, true>(w, scale, width, logs + start, out.sums)) {
      out.all_count = false;
      block_sums<kColumnScale, false>(w, scale, width, logs + start, out.sums);
    }
  }
  return out;
}

// Returns the sums of a row, and adds the row to the sums of the columns.
template <bool kColumnScale, class T>
DROT_HOST_DEVICE EntropySums<double> add_row(const T* y, const Wide<T>* column_scale, int64_t columns,
                                             Wide<T>* column_z, Wide<T>* column_t) {
  using Math = Wide<T>;
  EntropySums<double> sums;
  Math buffer[kBlock];
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t width = columns - start < kBlock ? columns - start : kBlock;
    const Math* w = load_block(y + start, width, buffer);
    const Math* scale = column_scale + (kColumnScale ? start : 0);
    Math* a = column_z + start;
    Math* b = column_t + start;
    Math z = 0, t = 0;
#pragma omp simd reduction(+ : z, t)
    for (int64_t j = 0; j < width; ++j) {
      const Math score = w[j] * weighted<kColumnScale>(w[j], scale, j);
      const Math s = counted_score(score), product = s * log_or_none(score);
      z += s;
      t += product;
      a[j] += s;
      b[j] += product;
    }
    sums.z += z;
    sums.t += t;
  }
  return sums;
}

// kLogs: p.logs holds the logarithms. kAll: and no score counts as 0.
template <bool kColumns, bool kLogs, bool kAll, bool kColumnScale, class T>
DROT_HOST_DEVICE void row_gradient(const EntropyRow<T>& p) {
  using Math = Wide<T>;
  Math buffer[kBlock], out[kBlock];
  for (int64_t start = 0; start < p.columns; start += kBlock) {
    const int64_t width = p.columns - start < kBlock ? p.columns - start : kBlock;
    const Math* w = load_block(p.y + start, width, buffer);
    const Math* column_scale = p.column_scale + (kColumnScale ? start : 0);
    const Math* logs = p.logs + (kLogs ? start : 0);
    const Math* mean_log = p.column_mean_log + (kColumns ? start : 0);
    const Math* weight = p.column_weight + (kColumns ? start : 0);
    Math* dcolumn_scale = p.dcolumn_scale + (kColumnScale ? start : 0);
    const EntropyGroup<Math> row = p.row;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const Math part = weighted<kColumnScale>(w[j], column_scale, j),
                 log = kLogs ? logs[j] : log_or_none(w[j] * part);
      Math ds = kAll ? (row.mean_log - log) * row.weight : entropy_slope(log, row);
      if (kColumns) ds += entropy_slope(log, EntropyGroup<Math>{mean_log[j], weight[j]});
      out[j] = 2 * part * ds;
      if (kColumnScale) dcolumn_scale[j] += w[j] * (w[j] * ds);
    }
    store_block(out, width, p.dy + start, p.stream);
  }
  finish_stores();
}

}  // namespace

template <class T>
EntropyRowSums entropy_row_sums(const T* y, const Wide<T>* column_scale, int64_t columns, Wide<T>* logs,
                                const T* next) {
  return column_scale ? row_sums<true>(y, column_scale, columns, logs, next)
                      : row_sums<false>(y, column_scale, columns, logs, next);
}

template <class T>
EntropySums<double> entropy_add_row(const T* y, const Wide<T>* column_scale, int64_t columns, Wide<T>* z,
                                    Wide<T>* t) {
  return column_scale ? add_row<true>(y, column_scale, columns, z, t)
                      : add_row<false>(y, column_scale, columns, z, t);
}

template <class T>
void entropy_row_gradient(const EntropyRow<T>& p) {
  if (!p.logs) {
    p.column_scale ? row_gradient<true, false, false, true>(p) : row_gradient<true, false, false, false>(p);
  } else if (p.all_count) {
    p.column_scale ? row_gradient<false, true, true, true>(p) : row_gradient<false, true, true, false>(p);
  } else {
    p.column_scale ? row_gradient<false, true, false, true>(p) : row_gradient<false, true, false, false>(p);
  }
}

#define DROT_INSTANTIATE(T)                                                                            \
  template EntropyRowSums entropy_row_sums(const T*, const Wide<T>*, int64_t, Wide<T>*, const T*);     \
  template EntropySums<double> entropy_add_row(const T*, const Wide<T>*, int64_t, Wide<T>*, Wide<T>*); \
  template void entropy_row_gradient(const EntropyRow<T>&);
DROT_INSTANTIATE(float)
DROT_INSTANTIATE(double)
DROT_INSTANTIATE(Bf16)
DROT_INSTANTIATE(Fp16)

}  // namespace drot::DROT_SIMD
