// How tensors reach the DROT_SIMD_SOURCES of the ops on scores (float_rows.h).
#pragma once

#include <ATen/ops/empty.h>

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ops/cpu/float_rows.h"

namespace drot {

// The stand-in of a type of torch, which has the same bits.
template <class T>
struct StoredOf {
  using Type = T;
};
template <>
struct StoredOf<at::BFloat16> {
  using Type = Bf16;
};
template <>
struct StoredOf<at::Half> {
  using Type = Fp16;
};
template <class T>
using Stored = typename StoredOf<T>::Type;

// Results of more bytes than this are written past the caches, which they would not stay in.
constexpr int64_t kStreamBytes = int64_t(16) << 20;

inline bool streams(const at::Tensor& out) { return static_cast<int64_t>(out.nbytes()) > kStreamBytes; }

// An empty tensor of y's shape and dtype. The allocator gets large ones from the kernel anew each
// time, and to fault them in by 4 KiB takes longer than to compute what goes there: ask for huge pages.
inline at::Tensor empty_result(const at::Tensor& y) {
  at::Tensor out = at::empty(y.sizes(), y.options());
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(out.mutable_data_ptr()) + kPage - 1) / kPage * kPage;
  if (streams(out)) madvise(reinterpret_cast<void*>(begin), out.nbytes() - kPage, MADV_HUGEPAGE);
#endif
  return out;
}

}  // namespace drot
