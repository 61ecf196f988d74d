#include "ops/cpu/sparsegpt_sweep_simd.h"

#include <cstring>

#include "ops/cpu/selection_lanes.h"
#include "ops/sparsegpt_sweep_math.h"

namespace drot::DROT_SIMD {
namespace {

// Takes the errors first … last - 1 from w, the weights of one column. Each weight's updates come
// in the order of the columns, as in the right-looking loop of the paper; reading errors instead of
// writing weights leaves one store a column. Explicit vectors, because GCC turns the plain loops
// into shuffles.
template <class T>
DROT_HOST_DEVICE void take_errors(T* w, const T* err, const T* factor, int64_t first, int64_t last) {
  typedef T Vector __attribute__((vector_size(32)));
  constexpr int kLanes = kSweepLanes<T>, kWidth = sizeof(Vector) / sizeof(T), kVectors = kLanes / kWidth;
  Vector sum[kVectors];
  std::memcpy(sum, w, sizeof(sum));
  for (int64_t i = first; i < last; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Vector e;
      std::memcpy(&e, err + i * kLanes + v * kWidth, sizeof(e));
      sweep_update(sum[v], e, factor[i]);
    }
  }
  std::memcpy(w, sum, sizeof(sum));
}

// The mask of the group that starts at column `start`, from the weights as updated so far.
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
  const int64_t step = p.choose ? p.group : 1;
  for (int64_t start = 0; start < p.columns; start += step) {
    for (int64_t j = start; j < start + step; ++j) {
      take_errors(p.w + j * kLanes, p.err, p.factor + j * p.columns, 0, start);
    }
    if (p.choose) choose_group(p, start);
    for (int64_t j = start; j < start + step; ++j) {
      T* w = p.w + j * kLanes;
      T* err = p.err + j * kLanes;
      const OrderedKey<T>* removed = p.removed + j * kLanes;
      take_errors(w, p.err, p.factor + j * p.columns, start, j);
      const T diagonal = p.factor[j * p.columns + j];
      for (int lane = 0; lane < kLanes; ++lane) {
        err[lane] = sweep_error(w[lane], diagonal, removed[lane] != 0);
        w[lane] = removed[lane] ? T(0) : w[lane];
      }
    }
  }
}

template void sweep_tile(const SweepTile<float>&);
template void sweep_tile(const SweepTile<double>&);

}  // namespace drot::DROT_SIMD
