#include "ops/skew_momentum.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/skew_momentum_math.h"

namespace drot {
namespace {

at::Tensor skew_momentum_cpu(const at::Tensor& product, at::Tensor& momentum, double decay,
                             std::optional<double> square_decay) {
  check_skew_momentum(product, momentum, decay, square_decay);
  const at::Tensor in = product.contiguous();
  at::Tensor out = at::empty(product.sizes(), in.options());
  const int64_t n = product.size(-1);
  if (product.numel() == 0) return out;
  const int64_t tiles = skew_tiles(n);
  const at::BFloat16* s = in.const_data_ptr<at::BFloat16>();
  at::BFloat16* m = momentum.mutable_data_ptr<at::BFloat16>();
  at::BFloat16* u = out.mutable_data_ptr<at::BFloat16>();
  const float factor = static_cast<float>(decay),
              square_factor = static_cast<float>(square_decay.value_or(0));
  // a tile is read and written with its mirror image, which lies in few cache lines too
  at::parallel_for(0, product.numel() / (n * n) * tiles, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const int64_t matrix = k / tiles * n * n, row = k % tiles * kSkewTile;
      for (int64_t column = row; column < n; column += kSkewTile) {
        for (int64_t i = row; i < std::min(row + kSkewTile, n); ++i) {
          for (int64_t j = std::max(column, i); j < std::min(column + kSkewTile, n); ++j) {
            const int64_t at = matrix + i * n + j, mirrored = matrix + j * n + i;
            const float skew = static_cast<float>(s[at]) - static_cast<float>(s[mirrored]);
            u[at] = i == j         ? skew
                    : square_decay ? adam_ratio(skew, factor, square_factor, m[at], m[mirrored])
                                   : nesterov_sum(skew, factor, m[at]);
            u[mirrored] = -static_cast<float>(u[at]);
          }
        }
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("skew_momentum", &skew_momentum_cpu); }

}  // namespace drot
