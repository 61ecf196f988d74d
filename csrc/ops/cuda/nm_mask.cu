// nm_mask on the GPU: groups by one thread each, rows by radix selection, wider rows by a sort.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/cuda/launcher.cuh"
#include "ops/nm_mask.h"

namespace drot {
namespace {

constexpr int kThreads = 256;
constexpr int kRowThreads = 1024;
constexpr int kDigits = 256;             // values of a digit: a pass of the radix selection takes 8 bits
constexpr int64_t kWidestRow = 1 << 16;  // columns that the radix selection takes

// One thread per group. kGroup: the size of a group, or 0 if `group` gives the size at run time.
//
// Args:
//   score: [groups, size].
//   groups: number of groups.
//   group: the size if kGroup is 0.
//   prune: scores of a group that are removed.
//   removed: [groups, size].
template <class T, int kGroup>
__global__ void __launch_bounds__(kThreads) mask_groups(const T* __restrict__ score, int64_t groups,
                                                        int group, int prune, bool* __restrict__ removed) {
  using Math = at::opmath_type<T>;
  constexpr int kMost = kGroup ? kGroup : kMaxGroup;
  const int size = kGroup ? kGroup : group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t g = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; g < groups; g += step) {
    const T* from = score + g * size;
    bool* to = removed + g * size;
    Math s[kMost];
    // The array is filled up with NaN, which is removed last, after NaN of a lower index.
#pragma unroll
    for (int i = 0; i < kMost; ++i) s[i] = i < size ? static_cast<Math>(from[i]) : Math(NAN);
    const uint32_t bits = removed_bits(s, prune);
    if constexpr (kGroup % 4 == 0 && kGroup > 0) {
      // four flags per store: `removed` is a new tensor, so groups of 4 k bytes are aligned to 4 bytes
#pragma unroll
      for (int i = 0; i < kGroup; i += 4) {
        const uint32_t b = bits >> i;
        reinterpret_cast<uint32_t*>(to)[i / 4] = (b & 1u) | (b & 2u) << 7 | (b & 4u) << 14 | (b & 8u) << 21;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < size) to[i] = (bits >> i) & 1u;
      }
    }
  }
}

// The key as an unsigned number of the same order; the radix selection takes its digits.
__device__ uint32_t radix_key(int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; }
__device__ uint64_t radix_key(int64_t key) { return static_cast<uint64_t>(key) ^ 0x8000000000000000ull; }

// One block per row. Radix selection finds the key of the prune-th smallest score, digit by digit. The kernel
// then removes all smaller scores, and of the equal ones those with the lowest indices. 0 < prune,
// columns ≤ kWidestRow. The counters are integers, so the result does not depend on the order of the atomics.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    mask_rows(const T* __restrict__ score, int columns, int prune, bool* __restrict__ removed) {
  using Math = at::opmath_type<T>;
  using Key = std::make_unsigned_t<OrderedKey<Math>>;
  __shared__ int count[kDigits];
  __shared__ Key shared_prefix;
  __shared__ int shared_left;
  __shared__ int warp_ties[kRowThreads / 32];

  const T* row = score + static_cast<int64_t>(blockIdx.x) * columns;
  bool* out = removed + static_cast<int64_t>(blockIdx.x) * columns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  Key prefix = 0;    // the digits found so far, the rest 0
  int left = prune;  // how many of the scores with this prefix are removed
  for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
    for (int d = threadIdx.x; d < kDigits; d += kRowThreads) count[d] = 0;
    __syncthreads();
    // mask of the digits above this one; a shift by the full width would be undefined
    const Key above = shift + 8 < 8 * static_cast<int>(sizeof(Key)) ? ~Key(0) << (shift + 8) : Key(0);
    for (int j = threadIdx.x; j < columns; j += kRowThreads) {
      const Key key = radix_key(ordered_key(static_cast<Math>(row[j])));
      if ((key & above) == prefix) atomicAdd(&count[(key >> shift) & 0xff], 1);
    }
    __syncthreads();
    if (warp == 0) {
      constexpr int kEach = kDigits / 32;
      int sum = 0;
      for (int d = lane * kEach; d < (lane + 1) * kEach; ++d) sum += count[d];
      int through = sum;  // scores whose digit belongs to this lane or to a lower lane
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += lower;
      }
      // true in exactly one lane: 1 ≤ left ≤ the number of scores with the prefix
      if (through - sum < left && left <= through) {
        int d = lane * kEach, rest = left - (through - sum);
        while (count[d] < rest) rest -= count[d++];
        shared_prefix = prefix | static_cast<Key>(d) << shift;
        shared_left = rest;
      }
    }
    __syncthreads();
    prefix = shared_prefix;
    left = shared_left;
  }

  // now prefix is the key of the largest removed score, left the number of scores with this key to remove
  for (int start = 0; start < columns; start += kRowThreads) {
    const int j = start + threadIdx.x;
    const Key key = j < columns ? radix_key(ordered_key(static_cast<Math>(row[j]))) : ~Key(0);
    const bool tie = j < columns && key == prefix;
    const unsigned ties = __ballot_sync(0xffffffffu, tie);
    if (lane == 0) warp_ties[warp] = __popc(ties);
    __syncthreads();
    int before = __popc(ties & ((1u << lane) - 1)), all = 0;
    for (int w = 0; w < kRowThreads / 32; ++w) {
      before += w < warp ? warp_ties[w] : 0;
      all += warp_ties[w];
    }
    if (j < columns) out[j] = key < prefix || (tie && before < left);
    left -= all;
    __syncthreads();  // before warp_ties is overwritten
  }
}

template <class T, int kGroup>
void launch_groups(Launcher& launcher, const T* score, int64_t groups, int group, int prune, bool* removed) {
  const int64_t wanted = (groups + kThreads - 1) / kThreads;
  const int64_t most = 32 * static_cast<int64_t>(launcher.multiprocessors());
  launcher.launch(mask_groups<T, kGroup>, dim3(static_cast<unsigned>(std::min(wanted, most))), dim3(kThreads),
                  /*shared_bytes=*/0, score, groups, group, prune, removed);
}

// For rows too wide for one block, usually a whole matrix seen as one row: a stable sort by the whole GPU.
// Adding 0 turns -0 into 0.
at::Tensor mask_by_sorting(const at::Tensor& score, int64_t prune) {
  const at::Tensor order = std::get<1>(at::sort(at::add(score, 0), /*stable=*/true, /*dim=*/-1));
  return at::zeros(score.sizes(), score.options().dtype(at::kBool))
      .scatter_(-1, order.narrow(-1, 0, prune), true);
}

at::Tensor nm_mask_cuda(const at::Tensor& score, int64_t prune, int64_t group) {
  check_nm_mask(score, prune, group);
  const c10::cuda::CUDAGuard guard(score.device());
  if (group == 0 && score.size(1) > kWidestRow) return mask_by_sorting(score, prune);
  const at::Tensor in = score.contiguous();
  at::Tensor out = at::empty(score.sizes(), score.options().dtype(at::kBool));
  if (prune == 0 || score.numel() == 0) return out.zero_();
  bool* removed = out.mutable_data_ptr<bool>();
  Launcher launcher(in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, score.scalar_type(), "nm_mask", [&] {
    const scalar_t* p = in.const_data_ptr<scalar_t>();
    if (group == 0) {
      TORCH_CHECK_VALUE(score.size(0) <= INT32_MAX, "score must have at most 2^31 - 1 rows, got ",
                        score.size(0));
      launcher.launch(mask_rows<scalar_t>, dim3(static_cast<unsigned>(score.size(0))), dim3(kRowThreads),
                      /*shared_bytes=*/0, p, static_cast<int>(score.size(1)), static_cast<int>(prune),
                      removed);
      return;
    }
    const int64_t groups = score.numel() / group;
    const int size = static_cast<int>(group), gone = static_cast<int>(prune);
    switch (size) {
      case 2:
        return launch_groups<scalar_t, 2>(launcher, p, groups, size, gone, removed);
      case 4:
        return launch_groups<scalar_t, 4>(launcher, p, groups, size, gone, removed);
      case 8:
        return launch_groups<scalar_t, 8>(launcher, p, groups, size, gone, removed);
      case 16:
        return launch_groups<scalar_t, 16>(launcher, p, groups, size, gone, removed);
      default:
        return launch_groups<scalar_t, 0>(launcher, p, groups, size, gone, removed);
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("nm_mask", &nm_mask_cuda); }

}  // namespace drot
