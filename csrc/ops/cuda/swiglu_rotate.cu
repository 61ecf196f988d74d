// swiglu_rotate on the GPU: the op. Its kernels are in swiglu_rotate_tiles.cuh.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launcher.cuh"
#include "ops/cuda/sparse24_mma.cuh"
#include "ops/cuda/swiglu_rotate_tiles.cuh"
#include "ops/swiglu_rotate.h"

namespace drot {
namespace {

// rotation: undefined without one; ends: undefined without experts.
template <class T>
SwigluProblem<T> problem(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& rotation,
                         const at::Tensor& ends, at::Tensor& out) {
  const int64_t experts = ends.defined() ? ends.size(0) : 1;
  const bool rotates = rotation.defined();
  const SwigluProblem<T> p{.gate = static_cast<const T*>(gate.const_data_ptr()),
                           .up = static_cast<const T*>(up.const_data_ptr()),
                           .rotation = rotates ? static_cast<const T*>(rotation.const_data_ptr()) : nullptr,
                           .out = static_cast<T*>(out.mutable_data_ptr()),
                           .gate_stride = gate.stride(0),
                           .up_stride = up.stride(0),
                           .tokens = gate.size(0),
                           .blocks = rotates ? rotation.size(0) / experts : 1,
                           .size = rotates ? rotation.size(1) : gate.size(1),
                           .experts = {.ends = ends.defined() ? ends.const_data_ptr<int32_t>() : nullptr,
                                       .experts = static_cast<int>(experts),
                                       .rows = gate.size(0)}};
  TORCH_CHECK_VALUE(swiglu_tiles(p, kFewTokens) <= INT32_MAX,
                    "gate must have less than 2^31 tiles of 16 x 64, got ", gate.sizes());
  return p;
}

at::Tensor swiglu_rotate_cuda(const at::Tensor& gate, const at::Tensor& up,
                              const std::optional<at::Tensor>& rotation,
                              const std::optional<at::Tensor>& ends) {
  check_swiglu_rotate(gate, up, rotation, ends);
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const at::Tensor gates = swiglu_rows(gate), ups = swiglu_rows(up);
  const at::Tensor blocks = rotation ? rotation->contiguous() : at::Tensor();
  const at::Tensor last = ends ? ends->contiguous() : at::Tensor();
  Launcher launcher(gates);
  switch (gate.scalar_type()) {
    case at::kFloat:
      run_swiglu_rotate_float(launcher, problem<float>(gates, ups, blocks, last, out));
      break;
    case at::kBFloat16:
      run_swiglu_rotate_16<Bf16Element>(launcher, problem<uint16_t>(gates, ups, blocks, last, out));
      break;
    default:
      run_swiglu_rotate_16<Fp16Element>(launcher, problem<uint16_t>(gates, ups, blocks, last, out));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("swiglu_rotate", &swiglu_rotate_cuda); }

}  // namespace drot
