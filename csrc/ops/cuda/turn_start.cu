// turn_start on the GPU: the op. Its kernel is in turn_start_tiles.cuh.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <tuple>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/turn_start_tiles.cuh"
#include "ops/turn_start.h"

namespace drot {
namespace {

std::tuple<at::Tensor, at::Tensor> turn_start_cuda(const at::Tensor& j, const at::Tensor& angle,
                                                   const std::optional<at::Tensor>& scale) {
  check_turn_start(j, angle, scale);
  const c10::cuda::CUDAGuard guard(j.device());
  const at::Tensor in = j.contiguous(), factors = angle.contiguous();
  at::Tensor change = at::empty(in.sizes(), in.options()), scaled = at::empty(in.sizes(), in.options());
  if (in.numel() == 0) return {change, scaled};
  const int64_t count = in.size(0), n = in.size(1);
  TORCH_CHECK_VALUE(stack_tiles(count, n, n) <= INT32_MAX, "j must have less than 2^31 tiles of ", kStackRows,
                    " x ", kStackColumns, ", got ", j.sizes());
  Launcher launcher(in);
  run_turn_start(launcher, {.j = in.const_data_ptr<at::BFloat16>(),
                            .angle = factors.const_data_ptr<float>(),
                            .scale = scale ? scale->const_data_ptr<at::BFloat16>() : nullptr,
                            .stride = scale ? scale->stride(0) : 0,
                            .change = change.mutable_data_ptr<at::BFloat16>(),
                            .scaled = scaled.mutable_data_ptr<at::BFloat16>(),
                            .count = count,
                            .n = n});
  return {change, scaled};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("turn_start", &turn_start_cuda); }

}  // namespace drot
