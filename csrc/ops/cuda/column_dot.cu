// column_dot on the GPU: the op. Its kernel is in column_dot_tiles.cuh.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/column_dot.h"
#include "ops/cuda/column_dot_tiles.cuh"

namespace drot {
namespace {

at::Tensor column_dot_cuda(const at::Tensor& a, const at::Tensor& b) {
  check_column_dot(a, b);
  const c10::cuda::CUDAGuard guard(a.device());
  const at::Tensor left = a.contiguous(), right = b.contiguous();
  const int64_t count = a.size(0), rows = a.size(1), columns = a.size(2);
  at::Tensor out = at::empty({count, columns}, left.options());
  if (out.numel() == 0) return out;
  // a grid has at most 2^31 - 1 by 65535 blocks; each takes 32 columns and 256 rows
  TORCH_CHECK_VALUE(out.numel() <= INT32_MAX && rows <= 65535 * kDotChunk,
                    "a must have less than 2^31 columns in all and 2^24 rows, got ", a.sizes());
  Launcher launcher(left);
  run_column_dot(launcher, {.a = left.const_data_ptr<float>(),
                            .b = right.const_data_ptr<float>(),
                            .out = out.mutable_data_ptr<float>(),
                            .count = count,
                            .rows = rows,
                            .columns = columns});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("column_dot", &column_dot_cuda); }

}  // namespace drot
