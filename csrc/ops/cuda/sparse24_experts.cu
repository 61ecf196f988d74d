// sparse24_experts on the GPU: the op. Its kernel is the skinny kernel of sparse24_linear
// (sparse24_skinny.cuh), whose blocks find their expert on the GPU, so that the CPU does not wait for the
// numbers of tokens, and a CUDA graph can hold the op.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launcher.cuh"
#include "common/no_autocast.h"
#include "ops/cuda/sparse24_mma.cuh"
#include "ops/cuda/sparse24_skinny.cuh"
#include "ops/sparse24_experts.h"

namespace drot {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// With more rows for each expert sparse24_linear has faster algorithms.
constexpr int64_t kMostRowsOfExpert = 128;

bool skinny_supports(const at::Tensor& x, int64_t experts, int64_t out) {
  const int64_t in = x.size(1);
  const bool fits = in > 0 && in % kSkinnyColumns == 0 && out <= kMostSkinnyRows && experts <= INT32_MAX;
  const bool few = x.size(0) <= kMostRowsOfExpert * experts;
  const bool capturing = at::cuda::currentStreamCaptureStatus() != at::cuda::CaptureStatus::None;
  return x.element_size() == 2 && fits && (few || capturing) && x.size(0) < INT32_MAX &&
         at::cuda::getCurrentDeviceProperties()->major >= 8;
}

void by_skinny(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
               const at::Tensor& ends, const OptionalTensor& bias, at::Tensor& y) {
  const at::Tensor inputs = contiguous_aligned(x), weights = contiguous_aligned(values);
  const at::Tensor packed = contiguous_aligned(positions), last = ends.contiguous();
  const at::Tensor biases = bias ? contiguous_aligned(*bias) : at::Tensor();
  SkinnyExperts p{};
  p.x = static_cast<const uint16_t*>(inputs.const_data_ptr());
  p.values = static_cast<const uint16_t*>(weights.const_data_ptr());
  p.positions = packed.const_data_ptr<uint8_t>();
  p.bias = bias ? static_cast<const uint16_t*>(biases.const_data_ptr()) : nullptr;
  p.y = static_cast<uint16_t*>(y.mutable_data_ptr());
  p.in = x.size(1);
  p.out = y.size(1);
  p.of_experts = {last.const_data_ptr<int32_t>(), static_cast<int>(last.size(0)), x.size(0)};
  Launcher launcher(y);
  y.scalar_type() == at::kBFloat16 ? run_sparse24_skinny_experts<Bf16Element>(launcher, p)
                                   : run_sparse24_skinny_experts<Fp16Element>(launcher, p);
}

// One product after the other, for which the CPU waits for `ends`.
void one_by_one(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                const at::Tensor& ends, const OptionalTensor& bias, at::Tensor& y) {
  using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);
  static const auto linear =
      c10::Dispatcher::singleton().findSchemaOrThrow("drot::sparse24_linear", "").typed<Linear>();
  const at::Tensor on_cpu = ends.to(at::kCPU).contiguous();
  check_expert_ends(on_cpu, values.size(0), x.size(0), on_cpu, "x");
  const auto* at = on_cpu.const_data_ptr<int32_t>();
  for (int64_t e = 0; e < values.size(0); ++e) {
    const int64_t first = e == 0 ? 0 : at[e - 1], count = at[e] - first;
    if (count == 0) continue;
    const OptionalTensor of_expert = bias ? OptionalTensor(bias->select(0, e)) : std::nullopt;
    y.narrow(0, first, count)
        .copy_(linear.call(x.narrow(0, first, count), values.select(0, e), positions.select(0, e), of_expert,
                           std::nullopt, std::nullopt, std::nullopt));
  }
}

at::Tensor sparse24_experts_cuda(const at::Tensor& x, const at::Tensor& values, const at::Tensor& positions,
                                 const at::Tensor& ends, const OptionalTensor& bias) {
  check_sparse24_experts(x, values, positions, ends, bias);
  const NoAutocast no_autocast;
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty({x.size(0), values.size(1)}, x.options());
  if (y.numel() == 0) return y;
  const bool skinny = skinny_supports(x, values.size(0), values.size(1));
  (skinny ? by_skinny : one_by_one)(x, values, positions, ends, bias, y);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("sparse24_experts", &sparse24_experts_cuda); }

}  // namespace drot
