#include "ops/sparse24_experts.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "common/cpu/float_rows.h"
#include "common/cpu/instructions.h"
#include "common/no_autocast.h"
#include "ops/cpu/sparse24_linear_simd.h"
#include "ops/cpu/sparse24_product.h"

namespace drot {
namespace {

// The rows first … first + count - 1 of x, which an expert has, and the number of the first among those of
// all experts with few rows.
struct Share {
  int64_t expert, first, count, of_few = 0;
};

struct Experts {
  at::Tensor x, values, positions, bias;  // contiguous; bias may be undefined
  int64_t in, out;
};

// The product of one expert, by the threads together.
void one_expert(const Experts& p, const Share& share, at::Tensor& y) {
  at::Tensor rows = y.narrow(0, share.first, share.count);
  const Sparse24Product product{p.x.narrow(0, share.first, share.count),
                                p.values.select(0, share.expert),
                                p.positions.select(0, share.expert),
                                p.bias.defined() ? p.bias.select(0, share.expert) : at::Tensor(),
                                {},
                                {},
                                share.count,
                                p.in,
                                p.out};
  multiply24(product, rows);
}

// The products of experts that have few rows each, in one loop over the weights of all: a thread starts once.
// multiply(rows, first, last): the rows first … last - 1 of W. x: as it reads them, `width` values a row of
// x.
template <class V, class X, class Multiply>
void all_experts(const Experts& p, const std::vector<Share>& shares, const X* x, int64_t width, at::Tensor& y,
                 const Multiply& multiply) {
  const int64_t units = (p.out + kRows24 - 1) / kRows24;  // of an expert
  const int64_t grain = std::max<int64_t>(1, kGrain24 / std::max<int64_t>(1, p.in * kRows24));
  at::parallel_for(0, static_cast<int64_t>(shares.size()) * units, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const Share& share = shares[begin / units];
      const int64_t unit = begin % units, last = std::min(units, unit + end - begin);
      const Sparse24Rows<V, X> rows{data24<V>(p.values) + share.expert * p.out * p.in / 2,
                                    p.positions.const_data_ptr<uint8_t>() + share.expert * p.out * p.in / 8,
                                    x + share.of_few * width,
                                    p.bias.defined() ? data24<V>(p.bias) + share.expert * p.out : nullptr,
                                    nullptr,
                                    nullptr,
                                    static_cast<V*>(y.mutable_data_ptr()) + share.first * p.out,
                                    share.count,
                                    p.in,
                                    p.out};
      multiply(rows, unit * kRows24, std::min(last * kRows24, p.out));
      begin += last - unit;
    }
  });
}

// The rows of x that the shares have.
at::Tensor rows_of(const Experts& p, const std::vector<Share>& shares) {
  std::vector<at::Tensor> rows;
  for (const Share& share : shares) rows.push_back(p.x.narrow(0, share.first, share.count));
  return at::cat(rows);
}

template <class V>
void all_experts_widened(const Experts& p, const std::vector<Share>& shares, at::Tensor& y) {
  const at::Tensor x = widened24(rows_of(p, shares));
  all_experts<V>(p, shares, x.const_data_ptr<float>(), padded24(p.in), y,
                 [](const Sparse24Rows<V>& rows, int64_t first, int64_t last) {
                   DROT_SIMD_CALL(sparse24_rows<V>)(rows, first, last);
                 });
}

#if defined(__x86_64__)
void all_experts_bf16(const Experts& p, const std::vector<Share>& shares, at::Tensor& y) {
  const int64_t width = padded_bf16(p.in);
  const int64_t rows = shares.back().of_few + shares.back().count;
  at::Tensor x = at::empty({rows * width}, p.x.options());
  auto* const to = static_cast<Bf16*>(x.mutable_data_ptr());
  for (const Share& share : shares) {
    avx512bf16::group_tokens(data24<Bf16>(p.x) + share.first * p.in, p.in, share.count, p.in,
                             to + share.of_few * width);
  }
  all_experts<Bf16>(p, shares, data24<Bf16>(x), width, y,
                    [](const Sparse24Rows<Bf16, Bf16>& rows, int64_t first, int64_t last) {
                      avx512bf16::sparse24_rows(rows, first, last);
                    });
}
#endif

at::Tensor sparse24_experts_cpu(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                const at::Tensor& ends, const std::optional<at::Tensor>& bias) {
  check_sparse24_experts(x, values, positions, ends, bias);
  const NoAutocast no_autocast;
  const Experts p{x.contiguous(),         values.contiguous(),
                  positions.contiguous(), bias ? bias->contiguous() : at::Tensor(),
                  2 * values.size(2),     values.size(1)};
  at::Tensor y = at::empty({x.size(0), p.out}, x.options());
  if (y.numel() == 0) return y;
  std::vector<Share> few;
  int64_t first = 0, rows_of_few = 0;
  const auto at = ends.accessor<int32_t, 1>();
  for (int64_t expert = 0; expert < values.size(0); ++expert) {
    const Share share{expert, first, at[expert] - first};
    first = at[expert];
    if (share.count > kTogether24) {
      one_expert(p, share, y);
    } else if (share.count > 0) {
      few.push_back(share);
      few.back().of_few = rows_of_few;
      rows_of_few += share.count;
    }
  }
  if (few.empty()) return y;
#if defined(__x86_64__)
  if (x.scalar_type() == at::kBFloat16 && has_bf16_products()) {
    all_experts_bf16(p, few, y);
    return y;
  }
#endif
  if (x.scalar_type() == at::kBFloat16) {
    all_experts_widened<Bf16>(p, few, y);
  } else if (x.scalar_type() == at::kHalf) {
    all_experts_widened<Fp16>(p, few, y);
  } else {
    all_experts_widened<float>(p, few, y);
  }
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("sparse24_experts", &sparse24_experts_cpu); }

}  // namespace drot
