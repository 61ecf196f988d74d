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

// Tokens of one expert, or of all without experts, that are rotated together.
struct Tile {
  int64_t token, count, first_block;
};

std::vector<Tile> tiles_of(int64_t tokens, int64_t blocks, const at::Tensor& ends) {
  std::vector<Tile> tiles;
  const auto add = [&](int64_t first, int64_t last, int64_t first_block) {
    for (; first < last; first += kTokensAtOnce)
      tiles.push_back({first, std::min(kTokensAtOnce, last - first), first_block});
  };
  if (!ends.defined()) {
    add(0, tokens, 0);
    return tiles;
  }
  const auto at = ends.accessor<int32_t, 1>();
  for (int64_t e = 0; e < ends.size(0); ++e) add(e == 0 ? 0 : at[e - 1], at[e], e * blocks);
  return tiles;
}

// ends: undefined without experts.
template <class T>
void run_blocks(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& rotation,
                const at::Tensor& ends, at::Tensor& out) {
  const int64_t size = rotation.size(1), blocks = out.size(1) / size;
  const int64_t padded = (size + kSwigluColumns - 1) / kSwigluColumns * kSwigluColumns;
  const std::vector<Tile> tiles = tiles_of(out.size(0), blocks, ends);
  const int64_t parts = static_cast<int64_t>(tiles.size());
  const auto* gates = static_cast<const T*>(gate.const_data_ptr());
  const auto* ups = static_cast<const T*>(up.const_data_ptr());
  const auto* rotations = static_cast<const T*>(rotation.const_data_ptr());
  auto* outs = static_cast<T*>(out.mutable_data_ptr());
  // a thread of its own costs about 5 µs, in which a core multiplies some blocks
  const int64_t together = std::min(out.size(0) / parts, kTokensAtOnce);
  const int64_t grain = std::max<int64_t>(1, 65536 / (size * size * together + 1));
  at::parallel_for(0, blocks * parts, grain, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(size * padded + kSwigluTokens * (size + padded));
    float* const gated = scratch.data() + size * padded;
    for (int64_t at = first; at < last; ++at) {
      const Tile& tile = tiles[at % parts];
      const int64_t block = at / parts, token = tile.token, column = block * size;
      DROT_SIMD_CALL(swiglu_rotate_block)
      (SwigluBlock<T>{.gate = gates + token * gate.stride(0) + column,
                      .up = ups + token * up.stride(0) + column,
                      .rotation = rotations + (tile.first_block + block) * size * size,
                      .out = outs + token * out.stride(0) + column,
                      .gate_stride = gate.stride(0),
                      .up_stride = up.stride(0),
                      .out_stride = out.stride(0),
                      .tokens = tile.count,
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
         const std::optional<at::Tensor>& ends, at::Tensor& out) {
  if (rotation) {
    run_blocks<T>(gate, up, rotation->contiguous(), ends.value_or(at::Tensor()), out);
  } else {
    run_rows<T>(gate, up, out);
  }
}

at::Tensor swiglu_rotate_cpu(const at::Tensor& gate, const at::Tensor& up,
                             const std::optional<at::Tensor>& rotation,
                             const std::optional<at::Tensor>& ends) {
  check_swiglu_rotate(gate, up, rotation, ends);
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  if (result.numel() == 0) return result;
  at::Tensor out = result.view({-1, gate.size(-1)});
  const at::Tensor gates = swiglu_rows(gate), ups = swiglu_rows(up);
  switch (gate.scalar_type()) {
    case at::kFloat:
      run<float>(gates, ups, rotation, ends, out);
      break;
    case at::kBFloat16:
      run<Bf16>(gates, ups, rotation, ends, out);
      break;
    default:
      run<Fp16>(gates, ups, rotation, ends, out);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("swiglu_rotate", &swiglu_rotate_cpu); }

}  // namespace drot
