#include "ops/nm_mask.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/nm_mask_simd.h"

namespace drot {
namespace {

// The mask of a tile: `groups` <= kMaskLanes neighbouring groups of `group` scores.
template <class T>
void mask_groups(const T* score, int groups, int group, int prune, bool* removed) {
  using Math = at::opmath_type<T>;
  OrderedKey<Math> key[kMaxGroup * kMaskLanes], mask[kMaxGroup * kMaskLanes];
  // lanes without a group are ranked too
  if (groups < kMaskLanes) std::fill(key, key + group * kMaskLanes, 0);
  for (int lane = 0; lane < groups; ++lane) {
    for (int i = 0; i < group; ++i) {
      key[i * kMaskLanes + lane] = ordered_key(static_cast<Math>(score[lane * group + i]));
    }
  }
  DROT_SIMD_CALL(mask_lanes<OrderedKey<Math>>)(key, group, prune, mask);
  for (int lane = 0; lane < groups; ++lane) {
    for (int i = 0; i < group; ++i) removed[lane * group + i] = mask[i * kMaskLanes + lane] != 0;
  }
}

// The mask of the `prune` smallest of the `columns` scores of a row. key: scratch memory, [columns].
template <class T, class Key>
void mask_row(const T* score, int64_t columns, int64_t prune, Key* key, bool* removed) {
  using Math = at::opmath_type<T>;
  if (prune == 0 || prune == columns) {
    std::fill(removed, removed + columns, prune != 0);
    return;
  }
  for (int64_t j = 0; j < columns; ++j) key[j] = ordered_key(static_cast<Math>(score[j]));
  std::nth_element(key, key + (prune - 1), key + columns);
  const Key last = key[prune - 1];
  // nth_element puts all smaller keys in front; the rest of the `prune` removed scores are ties with `last`
  int64_t ties = prune - std::count_if(key, key + prune, [&](Key k) { return k < last; });
  for (int64_t j = 0; j < columns; ++j) {
    const Key k = ordered_key(static_cast<Math>(score[j]));
    removed[j] = k < last || (k == last && ties-- > 0);
  }
}

at::Tensor nm_mask_cpu(const at::Tensor& score, int64_t prune, int64_t group) {
  check_nm_mask(score, prune, group);
  const at::Tensor in = score.contiguous();
  at::Tensor out = at::empty(score.sizes(), score.options().dtype(at::kBool));
  if (score.numel() == 0) return out;
  bool* removed = out.mutable_data_ptr<bool>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, score.scalar_type(), "nm_mask", [&] {
    const scalar_t* p = in.const_data_ptr<scalar_t>();
    if (group == 0) {
      const int64_t columns = score.size(1);
      at::parallel_for(0, score.size(0), 1, [&](int64_t first, int64_t last) {
        std::vector<OrderedKey<at::opmath_type<scalar_t>>> key(columns);
        for (int64_t i = first; i < last; ++i) {
          mask_row(p + i * columns, columns, prune, key.data(), removed + i * columns);
        }
      });
      return;
    }
    const int64_t groups = score.numel() / group;
    const int64_t tiles = (groups + kMaskLanes - 1) / kMaskLanes;
    at::parallel_for(0, tiles, 64, [&](int64_t first, int64_t last) {
      for (int64_t t = first * kMaskLanes; t < std::min(last * kMaskLanes, groups); t += kMaskLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kMaskLanes, groups - t));
        mask_groups(p + t * group, lanes, static_cast<int>(group), static_cast<int>(prune),
                    removed + t * group);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("nm_mask", &nm_mask_cpu); }

}  // namespace drot
