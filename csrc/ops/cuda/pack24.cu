// pack24 and unpack24 on the GPU: the packed form of a 2:4 weight (ops/pack24.h) and its inverse.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/pack24.h"
#include "ops/pack24_math.h"

namespace drot {
namespace {

constexpr int kThreads = 256;

// `count` neighbouring values, as bit patterns; at most 16 bytes are loaded or stored at once.
template <typename word_t, int count>
struct alignas(sizeof(word_t) * count > 16 ? 16 : sizeof(word_t) * count) Words {
  word_t at[count];
};

// One thread per byte of positions (eight columns).
//
// Args:
//   w: [rows, 8 · bytes_per_row].
//   values: [rows, 4 · bytes_per_row].
//   positions: [rows, bytes_per_row].
//   bytes: rows · bytes_per_row.
//   bad: set to the first row with more than two non-zeros in a group of four.
template <typename word_t>
__global__ void pack24_kernel(const word_t* w, word_t* values, uint8_t* positions, int64_t bytes,
                              int64_t bytes_per_row, int64_t* bad) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= bytes) {
    return;
  }
  const auto in = reinterpret_cast<const Words<word_t, 8>*>(w)[i];
  Words<word_t, 4> out;
  if (!pack24_byte(in.at, out.at, positions + i)) {
    atomicMin(reinterpret_cast<long long*>(bad), static_cast<long long>(i / bytes_per_row));
  }
  reinterpret_cast<Words<word_t, 4>*>(values)[i] = out;
}

// The inverse. bad: set to the first row whose positions do not ascend in a group of four; may be null.
template <typename word_t>
__global__ void unpack24_kernel(const word_t* values, const uint8_t* positions, word_t* w, int64_t bytes,
                                int64_t bytes_per_row, int64_t* bad) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= bytes) {
    return;
  }
  const auto in = reinterpret_cast<const Words<word_t, 4>*>(values)[i];
  Words<word_t, 8> out;
  if (!unpack24_byte(in.at, positions[i], out.at) && bad) {
    atomicMin(reinterpret_cast<long long*>(bad), static_cast<long long>(i / bytes_per_row));
  }
  reinterpret_cast<Words<word_t, 8>*>(w)[i] = out;
}

dim3 blocks_of(int64_t bytes) { return dim3(static_cast<unsigned>((bytes + kThreads - 1) / kThreads)); }

template <typename word_t>
void launch_pack(const at::Tensor& w, at::Tensor& values, at::Tensor& positions, at::Tensor& bad) {
  const int64_t bytes = positions.numel();
  Launcher(w).launch(pack24_kernel<word_t>, blocks_of(bytes), dim3(kThreads), /*shared_bytes=*/0,
                     static_cast<const word_t*>(w.const_data_ptr()),
                     static_cast<word_t*>(values.mutable_data_ptr()), positions.mutable_data_ptr<uint8_t>(),
                     bytes, positions.size(1), bad.mutable_data_ptr<int64_t>());
}

template <typename word_t>
void launch_unpack(const at::Tensor& values, const at::Tensor& positions, at::Tensor& w, int64_t* bad) {
  const int64_t bytes = positions.numel();
  Launcher(w).launch(unpack24_kernel<word_t>, blocks_of(bytes), dim3(kThreads), /*shared_bytes=*/0,
                     static_cast<const word_t*>(values.const_data_ptr()), positions.const_data_ptr<uint8_t>(),
                     static_cast<word_t*>(w.mutable_data_ptr()), bytes, positions.size(1), bad);
}

at::Tensor unpack(const at::Tensor& values, const at::Tensor& positions, int64_t* bad) {
  at::Tensor w = at::empty({values.size(0), 2 * values.size(1)}, values.options());
  if (w.numel() == 0) {
    return w;
  }
  values.element_size() == 2 ? launch_unpack<uint16_t>(values, positions, w, bad)
                             : launch_unpack<uint32_t>(values, positions, w, bad);
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
  w.element_size() == 2 ? launch_pack<uint16_t>(w, values, positions, bad)
                        : launch_pack<uint32_t>(w, values, positions, bad);
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
