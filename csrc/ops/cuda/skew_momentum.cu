// skew_momentum on the GPU: the op. Its kernel is in skew_momentum_tiles.cuh.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/skew_momentum_tiles.cuh"
#include "ops/skew_momentum.h"

namespace drot {
namespace {

static_assert(kTileSide == kSkewTile);

at::Tensor skew_momentum_cuda(const at::Tensor& product, at::Tensor& momentum, double decay,
                              std::optional<double> square_decay) {
  check_skew_momentum(product, momentum, decay, square_decay);
  const c10::cuda::CUDAGuard guard(product.device());
  const at::Tensor in = product.contiguous();
  at::Tensor out = at::empty(product.sizes(), in.options());
  if (product.numel() == 0) return out;
  const int64_t n = product.size(-1), count = product.numel() / (n * n), tiles = skew_tiles(n);
  TORCH_CHECK_VALUE(count * tiles * tiles <= INT32_MAX, "product must have less than 2^31 tiles of ",
                    kSkewTile, " x ", kSkewTile, ", got ", product.sizes());
  Launcher launcher(in);
  run_skew_momentum(launcher, {.product = in.const_data_ptr<at::BFloat16>(),
                               .momentum = momentum.mutable_data_ptr<at::BFloat16>(),
                               .out = out.mutable_data_ptr<at::BFloat16>(),
                               .count = count,
                               .n = n,
                               .decay = static_cast<float>(decay),
                               .adam = square_decay.has_value(),
                               .square_decay = static_cast<float>(square_decay.value_or(0))});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("skew_momentum", &skew_momentum_cuda); }

}  // namespace drot
