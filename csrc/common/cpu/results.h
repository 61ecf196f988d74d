// The type of a tensor's data in DROT_SIMD_SOURCES, and allocation of large results. Used by the CPU kernels
// of entropy_loss, pruned_importance and sparse24_linear.
#pragma once

#include <ATen/ops/empty.h>

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "common/cpu/float_rows.h"

namespace drot {

// The type of float_rows.h that has the bits of a torch type.
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

// A result of more bytes does not stay in the caches: it is written with non-temporal stores.
constexpr int64_t kStreamBytes = int64_t(16) << 20;

inline bool streams(const at::Tensor& out) { return static_cast<int64_t>(out.nbytes()) > kStreamBytes; }

// An empty tensor of y's shape and dtype, with huge pages where it is large. The allocator asks the kernel
// for large tensors anew each time, and page faults of 4 KiB each take longer than the computation of the
// contents.
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
