// pack24 and unpack24 on the GPU: the ops. Their kernels are in pack24_bytes.cuh.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/pack24_bytes.cuh"
#include "ops/pack24.h"

namespace drot {
namespace {

template <typename word_t>
void pack_words(const at::Tensor& w, at::Tensor& values, at::Tensor& positions, at::Tensor& bad) {
  Launcher launcher(w);
  run_pack24(launcher, static_cast<const word_t*>(w.const_data_ptr()),
             static_cast<word_t*>(values.mutable_data_ptr()), positions.mutable_data_ptr<uint8_t>(),
             positions.numel(), positions.size(1), bad.mutable_data_ptr<int64_t>());
}

template <typename word_t>
void unpack_words(const at::Tensor& values, const at::Tensor& positions, at::Tensor& w, int64_t* bad) {
  Launcher launcher(w);
  run_unpack24(launcher, static_cast<const word_t*>(values.const_data_ptr()),
               positions.const_data_ptr<uint8_t>(), static_cast<word_t*>(w.mutable_data_ptr()),
               positions.numel(), positions.size(1), bad);
}

at::Tensor unpack(const at::Tensor& values, const at::Tensor& positions, int64_t* bad) {
  at::Tensor w = at::empty({values.size(0), 2 * values.size(1)}, values.options());
  if (w.numel() == 0) {
    return w;
  }
  values.element_size() == 2 ? unpack_words<uint16_t>(values, positions, w, bad)
                             : unpack_words<uint32_t>(values, positions, w, bad);
  return w;
}

std::tuple<at::Tensor, at::Tensor> pack24_cuda(const at::Tensor& w_in) {
  check_pack24(w_in);
  const c10::cuda::CUDAGuard guard(w_in.device());
  const at::Tensor w = contiguous_aligned(w_in);
  const int64_t rows = w.size(0), columns = w.size(1);
  at::Tensor values = at::empty({rows, columns / 2}, w.options());
  at::Tensor positions = at::empty({rows, columns / 8}, w.options().dtype(at::kByte));
  if (w.numel() == 0) {
    return {values, positions};
  }
  at::Tensor bad = at::full({}, rows, w.options().dtype(at::kLong));
  w.element_size() == 2 ? pack_words<uint16_t>(w, values, positions, bad)
                        : pack_words<uint32_t>(w, values, positions, bad);
  check_packed_row(bad.item<int64_t>(), rows);
  return {values, positions};
}

at::Tensor unpack24_cuda(const at::Tensor& values_in, const at::Tensor& positions_in) {
  check_unpack24(values_in, positions_in);
  const c10::cuda::CUDAGuard guard(values_in.device());
  const at::Tensor values = contiguous_aligned(values_in), positions = positions_in.contiguous();
  const int64_t rows = values.size(0);
  at::Tensor bad = at::full({}, rows, values.options().dtype(at::kLong));
  at::Tensor w = unpack(values, positions, bad.mutable_data_ptr<int64_t>());
  check_unpacked_row(bad.item<int64_t>(), rows);
  return w;
}

}  // namespace

at::Tensor unpack24_unchecked_cuda(const at::Tensor& values, const at::Tensor& positions) {
  return unpack(values, positions, /*bad=*/nullptr);
}

TORCH_LIBRARY_IMPL(drot, CUDA, m) {
  m.impl("pack24", &pack24_cuda);
  m.impl("unpack24", &unpack24_cuda);
}

}  // namespace drot
