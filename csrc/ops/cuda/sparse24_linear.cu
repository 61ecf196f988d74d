#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "ops/cuda/mma24.cuh"
#include "ops/cuda/sparse24_library.h"
#include "ops/cuda/sparse24_skinny.cuh"
#include "ops/sparse24_linear.h"

namespace drot {
namespace {

// The arguments of one call, the tokens in one dimension, contiguous and aligned to 16 bytes.
struct Problem {
  at::Tensor x, values, positions;
  at::Tensor bias, residual, rotation;  // may be undefined
  int64_t tokens, in, out;
};

at::Tensor aligned(const at::Tensor& t) {
  const at::Tensor contiguous = t.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

template <class T>
const T* words_of(const at::Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.const_data_ptr()) : nullptr;
}

bool skinny_takes(const Problem& p) {
  return p.tokens <= 2 * kSkinnyTokens && p.x.element_size() == 2 && p.in > 0 && p.in % kSkinnyColumns == 0 &&
         at::cuda::getCurrentDeviceProperties()->major >= 8;
}

template <class E, int kTiles, int kTokenTiles>
void launch_tiles(const SkinnyProblem& p) {
  const int64_t blocks = (p.out + 16 * kTiles - 1) / (16 * kTiles);
  sparse24_skinny<E, kTiles, kTokenTiles>
      <<<static_cast<unsigned>(blocks), kSkinnyWarps * 32, 0, at::cuda::getCurrentCUDAStream()>>>(p);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class E>
void launch_skinny(const SkinnyProblem& p) {
  // two tiles read x half as often, where the blocks are enough for every multiprocessor
  const bool wide = p.out / 32 >= at::cuda::getCurrentDeviceProperties()->multiProcessorCount / 2;
  if (p.tokens <= kSkinnyTokens) {
    wide ? launch_tiles<E, 2, 1>(p) : launch_tiles<E, 1, 1>(p);
  } else {
    wide ? launch_tiles<E, 2, 2>(p) : launch_tiles<E, 1, 2>(p);
  }
}

void by_skinny(const Problem& p, at::Tensor& y) {
  at::Tensor residual = p.residual, rotation = p.rotation;
  if (rotation.defined() && p.out % kRotationColumns) {
    residual = at::mm(residual, rotation);
    rotation = at::Tensor();
  }
  const SkinnyProblem skinny{words_of<uint16_t>(p.x),
                             words_of<uint16_t>(p.values),
                             words_of<uint8_t>(p.positions),
                             words_of<uint16_t>(p.bias),
                             words_of<uint16_t>(residual),
                             words_of<uint16_t>(rotation),
                             static_cast<uint16_t*>(y.mutable_data_ptr()),
                             p.in,
                             p.out,
                             static_cast<int>(p.tokens)};
  y.scalar_type() == at::kBFloat16 ? launch_skinny<Bf16Element>(skinny) : launch_skinny<Fp16Element>(skinny);
}

// What is added to the product goes into y first; false where there is nothing to add.
bool write_added(const Problem& p, at::Tensor& y) {
  if (p.rotation.defined()) {
    p.bias.defined() ? at::addmm_out(y, p.bias, p.residual, p.rotation)
                     : at::mm_out(y, p.residual, p.rotation);
  } else if (p.residual.defined()) {
    y.copy_(p.residual);
    if (p.bias.defined()) y.add_(p.bias);
  } else if (p.bias.defined()) {
    y.copy_(p.bias.expand_as(y));
  }
  return p.residual.defined() || p.bias.defined();
}

at::Tensor sparse24_linear_cuda(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                const OptionalTensor& bias, const OptionalTensor& residual,
                                const OptionalTensor& rotation, const OptionalTensor& compressed) {
  check_sparse24_linear(x, values, positions, bias, residual, rotation, compressed);
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t out = values.size(0), in = 2 * values.size(1);
  at::Tensor result = at::empty(sparse24_linear_sizes(x, out), x.options());
  if (result.numel() == 0) return result;
  const int64_t tokens = result.numel() / out;
  const auto optional = [](const OptionalTensor& t) { return t ? aligned(*t) : at::Tensor(); };
  const Problem p{aligned(x.reshape({tokens, in})),
                  aligned(values),
                  aligned(positions),
                  optional(bias),
                  residual ? aligned(residual->reshape({tokens, out})) : at::Tensor(),
                  optional(rotation),
                  tokens,
                  in,
                  out};
  at::Tensor y = result.view({tokens, out});
  if (skinny_takes(p)) {
    by_skinny(p, y);
    return result;
  }
  const bool add = write_added(p, y);
  const char* reason = "it was called without the weight that sparse24_compress makes";
  if (compressed && compressed->numel() > 0 && sparse24_library::takes(x.scalar_type(), out, in, &reason)) {
    sparse24_library::multiply(aligned(*compressed), p.x, y, add);
    return result;
  }
  TORCH_WARN_ONCE("sparse24_linear makes the weight dense at each call with ", tokens,
                  " tokens, which is slow: ", reason);
  const at::Tensor w = unpack24_unchecked_cuda(p.values, p.positions);
  add ? y.addmm_(p.x, w.t()) : at::mm_out(y, p.x, w.t());
  return result;
}

at::Tensor sparse24_compress_cuda(const at::Tensor& values, const at::Tensor& positions) {
  check_unpack24(values, positions);
  const c10::cuda::CUDAGuard guard(values.device());
  if (!sparse24_library::takes(values.scalar_type(), values.size(0), 2 * values.size(1))) {
    return at::empty({0}, positions.options());
  }
  return sparse24_library::compress(unpack24_unchecked_cuda(aligned(values), aligned(positions)));
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) {
  m.impl("sparse24_linear", &sparse24_linear_cuda);
  m.impl("sparse24_compress", &sparse24_compress_cuda);
}

}  // namespace drot
