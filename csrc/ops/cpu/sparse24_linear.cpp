#include "ops/sparse24_linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "common/cpu/instructions.h"
#include "common/cpu/results.h"
#include "common/no_autocast.h"
#include "ops/cpu/sparse24_linear_simd.h"
#include "ops/cpu/sparse24_product.h"
#include "ops/pack24_math.h"

namespace drot {
namespace {

// Tokens multiplied together: their x in fp32 stays in the last-level cache while all of W is read.
constexpr int64_t kTokenBlock = 256;
// More tokens than this are multiplied by PyTorch's dense product in fp32, which is then faster.
constexpr int64_t kFewFloatTokens = 128;
// Rows of W that are made dense at a time for the dense product.
constexpr int64_t kDenseRows = 512;

// [n, columns] -> fp32 [n, padded columns].
template <class V>
at::Tensor widened(const at::Tensor& rows) {
  const at::Tensor from = rows.stride(1) == 1 ? rows : rows.contiguous();
  at::Tensor to = at::empty({from.size(0), padded24(from.size(1))}, from.options().dtype(at::kFloat));
  DROT_SIMD_CALL(widen_rows<V>)
  (static_cast<const V*>(from.const_data_ptr()), from.stride(0), from.size(0), from.size(1),
   to.mutable_data_ptr<float>());
  return to;
}

// Calls f(first, last) in parallel for ranges of n items. Each item costs `work` products, and ranges begin
// at multiples of `unit`.
template <class F>
void in_parallel(int64_t n, int64_t work, int64_t unit, const F& f) {
  const int64_t units = (n + unit - 1) / unit;
  at::parallel_for(0, units, std::max<int64_t>(1, kGrain24 / std::max<int64_t>(1, work * unit)),
                   [&](int64_t begin, int64_t end) { f(begin * unit, std::min(end * unit, n)); });
}

// residual · rotation, fp32 [tokens, out].
template <class V>
at::Tensor rotated(const Sparse24Product& p) {
  // for more tokens the dense product in fp32 is faster, even with the conversion of the rotation to fp32
  constexpr int64_t kFew = std::is_same_v<V, float> ? 3 : 16;
  if (p.tokens > kFew) return at::mm(p.residual.to(at::kFloat), p.rotation.to(at::kFloat));
  const at::Tensor residual = widened<V>(p.residual);
  at::Tensor out = at::empty({p.tokens, p.out}, residual.options());
  const at::Tensor by_columns = p.rotation.t().contiguous();  // no copy where the rotation lies by columns
  const RotatedColumns<V> columns{residual.const_data_ptr<float>(), data24<V>(by_columns),
                                  out.mutable_data_ptr<float>(), p.tokens, p.out};
  in_parallel(p.out, p.out * p.tokens, 64,
              [&](int64_t first, int64_t last) { DROT_SIMD_CALL(rotate_columns<V>)(columns, first, last); });
  return out;
}

// Multiplies in fp32 with W in its packed form, which is read once for every kTokenBlock tokens.
template <class V>
void by_packed_rows(const Sparse24Product& p, at::Tensor& y) {
  const at::Tensor rotated_residual = p.rotation.defined() ? rotated<V>(p) : at::Tensor();
  at::Tensor residual;
  if (p.residual.defined() && !p.rotation.defined()) residual = p.residual.contiguous();
  for (int64_t token = 0; token < p.tokens; token += kTokenBlock) {
    const int64_t tokens = std::min(kTokenBlock, p.tokens - token), at = token * p.out;
    const at::Tensor x = widened<V>(p.x.narrow(0, token, tokens));
    const Sparse24Rows<V> rows{data24<V>(p.values),
                               p.positions.const_data_ptr<uint8_t>(),
                               x.const_data_ptr<float>(),
                               data24<V>(p.bias),
                               residual.defined() ? data24<V>(residual) + at : nullptr,
                               p.rotation.defined() ? rotated_residual.const_data_ptr<float>() + at : nullptr,
                               static_cast<V*>(y.mutable_data_ptr()) + at,
                               tokens,
                               p.in,
                               p.out};
    in_parallel(p.out, p.in * tokens, kRows24,
                [&](int64_t first, int64_t last) { DROT_SIMD_CALL(sparse24_rows<V>)(rows, first, last); });
  }
}

#if defined(__x86_64__)
// What is added to x · Wᵀ beside the bias: in bf16 without a rotation, in fp32 with one.
std::pair<at::Tensor, at::Tensor> bf16_added(const Sparse24Product& p) {
  constexpr int64_t kFew = 2;  // for more tokens PyTorch's product is faster
  if (!p.rotation.defined()) return {p.residual.defined() ? p.residual.contiguous() : at::Tensor(), {}};
  return {{}, p.tokens > kFew ? at::mm(p.residual, p.rotation).to(at::kFloat) : rotated<Bf16>(p)};
}

// Multiplies in bf16 with W in its packed form, for few tokens. The CPU has bf16 products.
void by_bf16_rows(const Sparse24Product& p, at::Tensor& y) {
  const auto [residual, rotated_residual] = bf16_added(p);
  const at::Tensor from = p.x.stride(1) == 1 ? p.x : p.x.contiguous();
  at::Tensor x = at::empty({p.tokens * padded_bf16(p.in)}, p.x.options());
  avx512bf16::group_tokens(data24<Bf16>(from), from.stride(0), p.tokens, p.in,
                           static_cast<Bf16*>(x.mutable_data_ptr()));
  const Sparse24Rows<Bf16, Bf16> rows{data24<Bf16>(p.values),
                                      p.positions.const_data_ptr<uint8_t>(),
                                      data24<Bf16>(x),
                                      data24<Bf16>(p.bias),
                                      data24<Bf16>(residual),
                                      data24<float>(rotated_residual),
                                      static_cast<Bf16*>(y.mutable_data_ptr()),
                                      p.tokens,
                                      p.in,
                                      p.out};
  in_parallel(p.out, p.in * p.tokens, kRows24,
              [&](int64_t first, int64_t last) { avx512bf16::sparse24_rows(rows, first, last); });
}

// The same for more tokens, in equal blocks.
void by_bf16_tokens(const Sparse24Product& p, at::Tensor& y) {
  const bool tiles = has_amx();
  const auto [residual, rotated_residual] = bf16_added(p);
  const at::Tensor from = p.x.stride(1) == 1 ? p.x : p.x.contiguous();
  const int64_t most = tiles ? amx::kBlockTokens24 : kBlockTokens24, width = tiles ? padded_bf16(p.in) : p.in;
  const int64_t blocks = (p.tokens + most - 1) / most;
  const int64_t vectors = (p.tokens + kVectorTokens24 - 1) / kVectorTokens24;
  const int64_t block = (vectors + blocks - 1) / blocks * kVectorTokens24;
  at::Tensor x = at::empty({block * width}, p.x.options());
  if (width > p.in) x.zero_();
  for (int64_t token = 0; token < p.tokens; token += block) {
    const int64_t tokens = std::min(block, p.tokens - token), at = token * p.out;
    const int64_t now = (tokens + kVectorTokens24 - 1) / kVectorTokens24;
    const avx512bf16::PairStrides strides =
        tiles ? avx512bf16::PairStrides{2, width / 2} : avx512bf16::PairStrides{2 * now, 2};
    in_parallel(p.in, tokens, 64, [&](int64_t first, int64_t last) {
      avx512bf16::pair_tokens(data24<Bf16>(from) + token * from.stride(0), from.stride(0), tokens, first,
                              last, strides, static_cast<Bf16*>(x.mutable_data_ptr()));
    });
    const Sparse24Rows<Bf16, Bf16> rows{
        data24<Bf16>(p.values),
        p.positions.const_data_ptr<uint8_t>(),
        data24<Bf16>(x),
        data24<Bf16>(p.bias),
        residual.defined() ? data24<Bf16>(residual) + at : nullptr,
        rotated_residual.defined() ? data24<float>(rotated_residual) + at : nullptr,
        static_cast<Bf16*>(y.mutable_data_ptr()) + at,
        tokens,
        p.in,
        p.out};
    in_parallel(p.out, p.in * tokens, kRows24, [&](int64_t first, int64_t last) {
      if (!tiles) return avx512bf16::sparse24_token_rows(rows, first, last);
      const auto scratch = std::make_unique_for_overwrite<char[]>(amx::scratch_bytes(tokens));
      amx::sparse24_token_rows(rows, first, last, scratch.get());
    });
  }
}
#endif

// Multiplies in fp32 with PyTorch's dense product, with kDenseRows rows of W made dense at a time.
void by_dense_tiles(const Sparse24Product& p, at::Tensor& y) {
  const at::Tensor residual = p.rotation.defined() ? at::mm(p.residual, p.rotation) : p.residual;
  at::Tensor buffer = at::empty({std::min(kDenseRows, p.out), p.in}, p.values.options());
  for (int64_t first = 0; first < p.out; first += kDenseRows) {
    const int64_t count = std::min(kDenseRows, p.out - first), bytes = p.positions.size(1);
    const auto* values = data24<float>(p.values) + 4 * first * bytes;
    const auto* positions = p.positions.const_data_ptr<uint8_t>() + first * bytes;
    auto* dense = buffer.mutable_data_ptr<float>();
    in_parallel(count, p.in, 1, [=](int64_t begin, int64_t end) {
      const int64_t at = begin * bytes, stop = end * bytes;
      DROT_SIMD_CALL(expand_bytes<float>)(values + 4 * at, positions + at, stop - at, dense + 8 * at);
    });
    at::Tensor tile = at::linear(p.x, buffer.narrow(0, 0, count),
                                 p.bias.defined() ? p.bias.narrow(0, first, count) : OptionalTensor());
    if (residual.defined()) tile.add_(residual.narrow(1, first, count));
    y.narrow(1, first, count).copy_(tile);
  }
}

}  // namespace

at::Tensor widened24(const at::Tensor& x) {
  if (x.scalar_type() == at::kBFloat16) return widened<Bf16>(x);
  return x.scalar_type() == at::kHalf ? widened<Fp16>(x) : widened<float>(x);
}

void multiply24(const Sparse24Product& p, at::Tensor& y) {
  const at::ScalarType dtype = p.x.scalar_type();
  if (dtype == at::kFloat && p.tokens > kFewFloatTokens) {
    by_dense_tiles(p, y);
#if defined(__x86_64__)
  } else if (dtype == at::kBFloat16 && has_bf16_products()) {
    p.tokens > kTogether24 ? by_bf16_tokens(p, y) : by_bf16_rows(p, y);
#endif
  } else if (dtype == at::kBFloat16) {
    by_packed_rows<Bf16>(p, y);
  } else if (dtype == at::kHalf) {
    by_packed_rows<Fp16>(p, y);
  } else {
    by_packed_rows<float>(p, y);
  }
}

namespace {

at::Tensor sparse24_linear_cpu(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                               const OptionalTensor& bias, const OptionalTensor& residual,
                               const OptionalTensor& rotation, const OptionalTensor& compressed) {
  check_sparse24_linear(x, values, positions, bias, residual, rotation, compressed);
  const NoAutocast no_autocast;
  const int64_t out = values.size(0), in = 2 * values.size(1);
  at::Tensor y = at::empty(sparse24_linear_sizes(x, out), x.options());
  if (y.numel() == 0) return y;
  const int64_t tokens = y.numel() / out;
  const auto contiguous = [](const OptionalTensor& t) { return t ? t->contiguous() : at::Tensor(); };
  const Sparse24Product p{x.reshape({tokens, in}),
                          values.contiguous(),
                          positions.contiguous(),
                          contiguous(bias),
                          residual ? residual->reshape({tokens, out}) : at::Tensor(),
                          rotation.value_or(at::Tensor()),
                          tokens,
                          in,
                          out};
  at::Tensor rows = y.view({tokens, out});
  multiply24(p, rows);
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
