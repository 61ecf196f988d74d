#include "ops/cpu/pruned_importance_simd.h"

#include "common/cpu/selection_lanes.h"
#include "common/score_math.h"
#include "ops/cpu/pruned_importance_row_cut.h"
#include "ops/cpu/pruned_importance_transpose.h"

namespace drot::DROT_SIMD {
namespace {

// Groups that are ranked together, one in each vector lane.
constexpr int kLanes = 32;

// Returns Σ of the removed scores of a block, writes dy and adds to dcolumn_scale. w: y; removed: 0 or 1.
template <bool kColumnScale, class T>
DROT_HOST_DEVICE double sum_removed(const PrunedRow<T>& p, int64_t start, int64_t columns, const Wide<T>* w,
                                    const OrderedKey<Wide<T>>* removed) {
  using Math = Wide<T>;
  Math out[kMaxGroup * kLanes], sum = 0;
  const Math* column_scale = p.column_scale + start;
  Math* dcolumn_scale = p.dcolumn_scale + (kColumnScale ? start : 0);
  const Math scale = p.scale;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < columns; ++j) {
    const Math gone = removed[j] ? w[j] : Math(0), part = gone * column_scale[j];
    sum += gone * part;
    out[j] = 2 * part * scale;
    if (kColumnScale) dcolumn_scale[j] += gone * gone * scale;
  }
  store_block(out, columns, p.dy + start, p.stream);
  return sum;
}

// Computes the keys of the scores of a block. Returns whether a score is not finite.
template <class Math>
DROT_HOST_DEVICE bool make_keys(const Math* w, const Math* column_scale, int64_t columns,
                                OrderedKey<Math>* key) {
  Math bad = 0;
#pragma omp simd reduction(+ : bad)
  for (int64_t j = 0; j < columns; ++j) {
    const Math s = score_of(w[j], column_scale[j]);
    key[j] = ordered_key(s);
    bad += s - s;  // 0, or NaN
  }
  return bad != 0;
}

// The mask of kLanes neighbouring groups, key and removed in the order of the columns. kGroup is the group,
// or 0 where the compiler does not know it. Where a row ends earlier, the mask behind its end is meaningless.
// Not inlined: it would be compiled for each type of y, which takes minutes, in place of each type of key.
template <int kGroup, class Key>
[[gnu::noinline]] void mark_removed(const Key* key, int group, int prune, Key* removed) {
  Key by_lane[kMaxGroup * kLanes], marks[kMaxGroup * kLanes];
  columns_to_lanes<kLanes>(key, kGroup ? kGroup : group, by_lane);
  removed_lanes<kLanes>(by_lane, kGroup ? kGroup : group, prune, marks);
  lanes_to_columns<kLanes>(marks, kGroup ? kGroup : group, removed);
}

template <int kGroup, bool kColumnScale, class T>
DROT_HOST_DEVICE double prune_groups(const PrunedRow<T>& p) {
  using Math = Wide<T>;
  const int group = static_cast<int>(p.group), prune = static_cast<int>(p.prune);
  const int64_t tile = (kGroup ? kGroup : group) * kLanes;
  Math buffer[kMaxGroup * kLanes];
  OrderedKey<Math> key[kMaxGroup * kLanes] = {}, removed[kMaxGroup * kLanes];
  double sum = 0;
  bool bad = false;
  for (int64_t start = 0; start < p.columns; start += tile) {
    const int64_t width = p.columns - start < tile ? p.columns - start : tile;
    const Math* w = load_block(p.y + start, width, buffer);
    bad |= make_keys(w, p.column_scale + start, width, key);
    mark_removed<kGroup>(key, group, prune, removed);
    sum += sum_removed<kColumnScale>(p, start, width, w, removed);
  }
  return bad ? __builtin_nan("") : sum;
}

template <bool kColumnScale, class T>
DROT_HOST_DEVICE double prune_whole_row(const PrunedRow<T>& p) {
  using Math = Wide<T>;
  Math buffer[kBlock];
  OrderedKey<Math> removed[kBlock];
  bool bad = false;
  for (int64_t start = 0; start < p.columns; start += kBlock) {
    const int64_t width = p.columns - start < kBlock ? p.columns - start : kBlock;
    bad |= make_keys(load_block(p.y + start, width, buffer), p.column_scale + start, width, p.key + start);
  }
  const Cut<OrderedKey<Math>> cut = cut_of_row(p.key, p.columns, p.prune);
  double sum = 0;
  for (int64_t start = 0; start < p.columns; start += kBlock) {
    const int64_t width = p.columns - start < kBlock ? p.columns - start : kBlock;
    const Math* w = load_block(p.y + start, width, buffer);
    const OrderedKey<Math>* key = p.key + start;
    const int64_t ties = cut.ties_end - start;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) removed[j] = key[j] < cut.key;
    for (int64_t j = 0; j < (ties < width ? ties : width); ++j) removed[j] |= key[j] == cut.key;
    sum += sum_removed<kColumnScale>(p, start, width, w, removed);
  }
  return bad ? __builtin_nan("") : sum;
}

template <bool kColumnScale, class T>
DROT_HOST_DEVICE double prune_row_or_groups(const PrunedRow<T>& p) {
  switch (p.group) {
    case 0:
      return prune_whole_row<kColumnScale>(p);
    case 2:
      return prune_groups<2, kColumnScale>(p);
    case 4:
      return prune_groups<4, kColumnScale>(p);
    case 8:
      return prune_groups<8, kColumnScale>(p);
    case 16:
      return prune_groups<16, kColumnScale>(p);
    case 32:
      return prune_groups<32, kColumnScale>(p);
    default:
      return prune_groups<0, kColumnScale>(p);
  }
}

}  // namespace

template <class T>
double prune_row(const PrunedRow<T>& p) {
  const double sum = p.dcolumn_scale ? prune_row_or_groups<true>(p) : prune_row_or_groups<false>(p);
  finish_stores();
  return sum;
}

template double prune_row(const PrunedRow<float>&);
template double prune_row(const PrunedRow<double>&);
template double prune_row(const PrunedRow<Bf16>&);
template double prune_row(const PrunedRow<Fp16>&);

}  // namespace drot::DROT_SIMD
