// The gradient of swiglu_rotate. In C++, because a formula in Python takes longer than the op for a few
// tokens.
#include "ops/swiglu_rotate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/sigmoid.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "common/no_autocast.h"

namespace drot {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Rotation = std::optional<at::Tensor>;
using Ends = std::optional<at::Tensor>;

at::Tensor below_autograd(const at::Tensor& gate, const at::Tensor& up, const Rotation& rotation,
                          const Ends& ends) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("drot::swiglu_rotate", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const Rotation&, const Ends&)>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(gate, up, rotation, ends);
}

struct SwigluRotate : torch::autograd::Function<SwigluRotate> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up,
                            const Rotation& rotation) {
    ctx->save_for_backward({gate, up, rotation.value_or(at::Tensor())});
    return below_autograd(gate, up, rotation, std::nullopt);
  }

  // Of ops that have a gradient themselves. The arithmetic is in fp32, as in the op.
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const NoAutocast no_autocast;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor gate = saved[0].to(at::kFloat), up = saved[1].to(at::kFloat);
    const at::Tensor sigmoid = at::sigmoid(gate), silu = gate * sigmoid;
    at::Tensor of_gated = gradients[0].to(at::kFloat);
    variable_list found(3);
    if (saved[2].defined()) {
      const at::Tensor rotation = saved[2].to(at::kFloat);
      const int64_t tokens = gate.numel() / std::max<int64_t>(1, gate.size(-1));
      const auto in_blocks = [&](const at::Tensor& t) {
        return t.reshape({tokens, rotation.size(0), rotation.size(1)});
      };
      const at::Tensor gradient = in_blocks(of_gated);
      of_gated = at::einsum("tnj,nij->tni", {gradient, rotation}).reshape(gate.sizes());
      if (ctx->needs_input_grad(2)) {
        found[2] = at::einsum("tni,tnj->nij", {in_blocks(silu * up), gradient}).to(saved[2].scalar_type());
      }
    }
    if (ctx->needs_input_grad(0)) {
      found[0] = (of_gated * up * sigmoid * (1 + gate * (1 - sigmoid))).to(saved[0].scalar_type());
    }
    if (ctx->needs_input_grad(1)) found[1] = (of_gated * silu).to(saved[1].scalar_type());
    return found;
  }
};

bool has_tangent(const at::Tensor& t) { return t._fw_grad(/*level=*/0).defined(); }

at::Tensor swiglu_rotate_autograd(const at::Tensor& gate, const at::Tensor& up, const Rotation& rotation,
                                  const Ends& ends) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(gate) && !has_tangent(up) && !(rotation && has_tangent(*rotation)),
                              "swiglu_rotate has no forward-mode derivative; use swiglu_rotate_ref");
  const bool needed = gate.requires_grad() || up.requires_grad() || (rotation && rotation->requires_grad());
  if (!needed || !at::GradMode::is_enabled()) return below_autograd(gate, up, rotation, ends);
  TORCH_CHECK_NOT_IMPLEMENTED(!ends, "swiglu_rotate has no gradient with ends; call it for each expert");
  return SwigluRotate::apply(gate, up, rotation);
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, Autograd, m) { m.impl("swiglu_rotate", &swiglu_rotate_autograd); }

}  // namespace drot
