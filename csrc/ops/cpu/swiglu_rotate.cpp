#include "ops/swiglu_rotate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/swiglu_rotate_simd.h"

namespace drot {
namespace {

constexpr int64_t kTokensAtOnce = 64;  // tokens for which a thread widens a block

constexpr int64_t kColumnsAtOnce = 4096;  // columns without a rotation, of one token, that a thread takes

template <class T>
void run_rows(const at::Tensor& gate, const at::Tensor& up, at::Tensor& out) {
  const int64_t columns = out.size(1), parts = (columns + kColumnsAtOnce - 1) / kColumnsAtOnce;
  const auto* gates = static_cast<const T*>(gate.const_data_ptr());
  const auto* ups = static_cast<const T*>(up.const_data_ptr());
  auto* outs = static_cast<T*>(out.mutable_data_ptr());
  // as many columns as a core computes while a thread of its own starts
  at::parallel_for(0, out.size(0) * parts, 2, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      const int64_t token = at / parts, column = at % parts * kColumnsAtOnce;
      DROT_SIMD_CALL(swiglu_row)
      (gates + token * gate.stride(0) + column, ups + token * up.stride(0) + column,
       outs + token * out.stride(0) + column, std::min(kColumnsAtOnce, columns - column));
    }
  });
}

template <class T>
void run_blocks(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& rotation, at::Tensor& out) {
  const int64_t tokens = out.size(0), blocks = rotation.size(0), size = rotation.size(1);
  const int64_t padded = (size + kSwigluColumns - 1) / kSwigluColumns * kSwigluColumns;
  const int64_t parts = (tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  const auto* gates = static_cast<const T*>(gate.const_data_ptr());
  const auto* ups = static_cast<const T*>(up.const_data_ptr());
  const auto* rotations = static_cast<const T*>(rotation.const_data_ptr());
  auto* outs = static_cast<T*>(out.mutable_data_ptr());
  // a thread of its own costs about 5 µs, in which a core multiplies some blocks
  const int64_t grain = std::max<int64_t>(1, 65536 / (size * size * std::min(tokens, kTokensAtOnce) + 1));
  at::parallel_for(0, blocks * parts, grain, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(size * padded + kSwigluTokens * (size + padded));
    float* const gated = scratch.data() + size * padded;
    for (int64_t at = first; at < last; ++at) {
      const int64_t block = at / parts, token = at % parts * kTokensAtOnce, column = block * size;
      DROT_SIMD_CALL(swiglu_rotate_block)
      (SwigluBlock<T>{.gate = gates + token * gate.stride(0) + column,
                      .up = ups + token * up.stride(0) + column,
                      .rotation = rotations + block * size * size,
                      .out = outs + token * out.stride(0) + column,
                      .gate_stride = gate.stride(0),
                      .up_stride = up.stride(0),
                      .out_stride = out.stride(0),
                      .tokens = std::min(kTokensAtOnce, tokens - token),
                      .size = size,
                      .padded = padded,
                      .block = scratch.data(),
                      .gated = gated,
                      .sums = gated + kSwigluTokens * size});
    }
  });
}

template <class T>
void run(const at::Tensor& gate, const at::Tensor& up, const std::optional<at::Tensor>& rotation,
         at::Tensor& out) {
  if (rotation) {
    run_blocks<T>(gate, up, rotation->contiguous(), out);
  } else {
    run_rows<T>(gate, up, out);
  }
}

at::Tensor swiglu_rotate_cpu(const at::Tensor& gate, const at::Tensor& up,
                             const std::optional<at::Tensor>& rotation) {
  check_swiglu_rotate(gate, up, rotation);
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  if (result.numel() == 0) return result;
  at::Tensor out = result.view({-1, gate.size(-1)});
  const at::Tensor gates = swiglu_rows(gate), ups = swiglu_rows(up);
  switch (gate.scalar_type()) {
    case at::kFloat:
      run<float>(gates, ups, rotation, out);
      break;
    case at::kBFloat16:
      run<Bf16>(gates, ups, rotation, out);
      break;
    default:
      run<Fp16>(gates, ups, rotation, out);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("swiglu_rotate", &swiglu_rotate_cpu); }

}  // namespace drot
