#include "ops/cpu/sparsegpt_sweep_simd.h"

#include <cstring>

#include "common/cpu/selection_lanes.h"
#include "ops/sparsegpt_sweep_math.h"

namespace drot::DROT_SIMD {
namespace {

// Explicit vectors: GCC makes shuffles and branches of plain loops.
template <class T>
struct Vectors {
  typedef T Value __attribute__((vector_size(32)));
  typedef OrderedKey<T> Flag __attribute__((vector_size(32)));
  static constexpr int kWidth = sizeof(Value) / sizeof(T);
  static constexpr int kCount = kSweepLanes<T> / kWidth;
};

// Subtracts the errors of columns first … last - 1 from kColumns neighbouring columns: w
// [kColumns][kSweepLanes], factor [kColumns][columns]. Each weight is updated in the order of the columns, as
// in the right-looking loop of the paper. Because this loop is left-looking, a column is stored once. The
// sums of two columns hide the latency of an addition.
template <int kColumns, class T>
DROT_HOST_DEVICE void subtract_errors(T* w, const T* err, const T* factor, int64_t columns, int64_t first,
                                      int64_t last) {
  using V = Vectors<T>;
  typename V::Value sum[kColumns][V::kCount], e;
  std::memcpy(sum, w, sizeof(sum));
  for (int64_t i = first; i < last; ++i) {
    for (int v = 0; v < V::kCount; ++v) {
      std::memcpy(&e, err + i * kSweepLanes<T> + v * V::kWidth, sizeof(e));
      for (int c = 0; c < kColumns; ++c) sweep_update(sum[c][v], e, factor[c * columns + i]);
    }
  }
  std::memcpy(w, sum, sizeof(sum));
}

// Writes the errors of one column, and sets its removed weights to zero.
template <class T>
DROT_HOST_DEVICE void zero_removed(T* w, T* err, const OrderedKey<T>* removed, T diagonal) {
  using V = Vectors<T>;
  for (int at = 0; at < kSweepLanes<T>; at += V::kWidth) {
    typename V::Value value, e;
    typename V::Flag flag;
    std::memcpy(&value, w + at, sizeof(value));
    std::memcpy(&flag, removed + at, sizeof(flag));
    sweep_error(e, value, diagonal, flag != 0);
    value = flag != 0 ? typename V::Value{} : value;
    std::memcpy(err + at, &e, sizeof(e));
    std::memcpy(w + at, &value, sizeof(value));
  }
}

// Chooses the mask of the group that starts at column `start` from its updated weights.
template <class T>
DROT_HOST_DEVICE void choose_group(const SweepTile<T>& p, int64_t start) {
  constexpr int kLanes = kSweepLanes<T>;
  OrderedKey<T> key[kMaxGroup * kLanes];
  for (int i = 0; i < p.group; ++i) {
    const int64_t j = start + i;
    const T diagonal = p.factor[j * p.columns + j];
    for (int lane = 0; lane < kLanes; ++lane) {
      key[i * kLanes + lane] = ordered_key(sweep_score(p.w[j * kLanes + lane], diagonal));
    }
  }
  removed_lanes<kLanes>(key, p.group, p.prune, p.removed + start * kLanes);
}

}  // namespace

template <class T>
void sweep_tile(const SweepTile<T>& p) {
  constexpr int kLanes = kSweepLanes<T>;
  const int64_t step = p.choose ? p.group : 8;
  for (int64_t start = 0; start < p.columns; start += step) {
    const int64_t stop = start + step < p.columns ? start + step : p.columns;
    int64_t j = start;
    for (; j + 2 <= stop; j += 2) {
      subtract_errors<2>(p.w + j * kLanes, p.err, p.factor + j * p.columns, p.columns, 0, start);
    }
    if (j < stop) subtract_errors<1>(p.w + j * kLanes, p.err, p.factor + j * p.columns, p.columns, 0, start);
    if (p.choose) choose_group(p, start);
    for (j = start; j < stop; ++j) {
      const T* factor = p.factor + j * p.columns;
      subtract_errors<1>(p.w + j * kLanes, p.err, factor, p.columns, start, j);
      zero_removed(p.w + j * kLanes, p.err + j * kLanes, p.removed + j * kLanes, factor[j]);
    }
  }
}

template void sweep_tile(const SweepTile<float>&);
template void sweep_tile(const SweepTile<double>&);

}  // namespace drot::DROT_SIMD
