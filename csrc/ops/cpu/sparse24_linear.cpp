#include "ops/sparse24_linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>

#include "common/pack24.h"

namespace drot {
namespace {

// Bytes of a tile of dense rows: what stays in the caches between its making and its product.
constexpr int64_t kTileBytes = int64_t(4) << 20;

// Rows first … first + dense.size(0) - 1 of W.
template <class word_t>
void expand_rows(const at::Tensor& values, const at::Tensor& positions, int64_t first, at::Tensor& dense) {
  const int64_t bytes = positions.size(1);
  const auto* value = static_cast<const word_t*>(values.const_data_ptr()) + first * 4 * bytes;
  const auto* position = positions.const_data_ptr<uint8_t>() + first * bytes;
  auto* out = static_cast<word_t*>(dense.mutable_data_ptr());
  at::parallel_for(0, dense.size(0) * bytes, 1 << 12, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unpack24_byte(value + 4 * i, position[i], out + 8 * i);
  });
}

// y [tokens, out] by tiles of rows of W that are made dense, in fp32.
void by_dense_tiles(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                    const OptionalTensor& bias, const OptionalTensor& residual,
                    const OptionalTensor& rotation, at::Tensor& y) {
  const int64_t out = y.size(1), in = x.size(1);
  const int64_t rows = std::clamp<int64_t>(kTileBytes / std::max<int64_t>(4 * in, 1), 16, 1024);
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor stream = rotation ? residual->to(at::kFloat) : at::Tensor();
  at::Tensor buffer = at::empty({std::min(rows, out), in}, values.options());
  for (int64_t first = 0; first < out; first += rows) {
    const int64_t count = std::min(rows, out - first);
    at::Tensor dense = buffer.narrow(0, 0, count);
    values.element_size() == 2 ? expand_rows<uint16_t>(values, positions, first, dense)
                               : expand_rows<uint32_t>(values, positions, first, dense);
    at::Tensor tile = at::mm(wide, dense.to(at::kFloat).t());
    if (rotation) {
      tile.addmm_(stream, rotation->narrow(1, first, count).to(at::kFloat));
    } else if (residual) {
      tile.add_(residual->narrow(1, first, count));
    }
    if (bias) tile.add_(bias->narrow(0, first, count));
    y.narrow(1, first, count).copy_(tile);
  }
}

at::Tensor sparse24_linear_cpu(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                               const OptionalTensor& bias, const OptionalTensor& residual,
                               const OptionalTensor& rotation, const OptionalTensor& compressed) {
  check_sparse24_linear(x, values, positions, bias, residual, rotation, compressed);
  const int64_t out = values.size(0), in = 2 * values.size(1);
  at::Tensor y = at::empty(sparse24_linear_sizes(x, out), x.options());
  if (y.numel() == 0) return y;
  const int64_t tokens = y.numel() / out;
  at::Tensor rows = y.view({tokens, out});
  const OptionalTensor stream =
      residual ? OptionalTensor(residual->reshape({tokens, out})) : OptionalTensor();
  by_dense_tiles(x.reshape({tokens, in}), values.contiguous(), positions.contiguous(), bias, stream, rotation,
                 rows);
  return y;
}

at::Tensor sparse24_compress_cpu(const at::Tensor& values, const at::Tensor& positions) {
  check_unpack24(values, positions);
  return at::empty({0}, positions.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) {
  m.impl("sparse24_linear", &sparse24_linear_cpu);
  m.impl("sparse24_compress", &sparse24_compress_cpu);
}

}  // namespace drot
