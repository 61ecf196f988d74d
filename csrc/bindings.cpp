// The schemas of all drot ops, and the Python module drot._C with the functions that are not tensor ops.
//
// The kernels are registered by TORCH_LIBRARY_IMPL in csrc/ops/cpu and csrc/ops/cuda. Shapes and meaning are
// documented in csrc/ops/<op>.h and drot/ops/<op>.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "common/cpu/instructions.h"
#include "common/tuning_cache.h"
#include "ops/polar_start.h"
#include "ops/skew_momentum.h"
#include "ops/spectral_step.h"
#include "ops/turn_start.h"

TORCH_LIBRARY(drot, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "entropy_loss(Tensor y, Tensor? column_scale=None, *, bool rows=True, bool columns=False,"
      " float scale=1.0) -> (Tensor loss, Tensor dy, Tensor dcolumn_scale)",
      tags);
  m.def(
      "pruned_importance(Tensor y, Tensor? column_scale=None, *, int prune, int group, float scale=1.0)"
      " -> (Tensor loss, Tensor dy, Tensor dcolumn_scale)",
      tags);
  m.def("nm_mask(Tensor score, int prune, int group) -> Tensor", tags);
  m.def(
      "sparsegpt_sweep(Tensor w, Tensor hinv, Tensor? removed, int prune, int group)"
      " -> (Tensor w_out, Tensor err, Tensor removed_out)",
      tags);
  m.def("batched_qr(Tensor a) -> (Tensor q, Tensor r)", tags);
  m.def("batched_qr_backward(Tensor gq, Tensor q, Tensor r) -> Tensor", tags);
  m.def("cholesky_qr(Tensor a) -> (Tensor q, Tensor r, Tensor reliable)", tags);
  m.def("skew_momentum(Tensor product, Tensor(a!) momentum, float decay, float? square_decay=None) -> Tensor",
        tags);
  m.def("polar_start(Tensor squared, Tensor fourth, float a, float b, float c, float margin) -> Tensor",
        tags);
  m.def("column_scale(Tensor product, bool inverse) -> Tensor", tags);
  m.def("column_scale_backward(Tensor product, Tensor value, Tensor gradient, bool inverse) -> Tensor", tags);
  m.def("turn_start(Tensor j, Tensor angle, Tensor? scale=None) -> (Tensor change, Tensor scaled)", tags);
  m.def(
      "spectral_step(Tensor(a!) q, Tensor(b!) momentum, Tensor gradient, Tensor unit, Tensor angle,"
      " float decay, float[] polynomials, float margin) -> ()",
      tags);
  m.def("pack24(Tensor w) -> (Tensor values, Tensor positions)", tags);
  m.def("unpack24(Tensor values, Tensor positions) -> Tensor", tags);
  m.def(
      "sparse24_linear(Tensor x, Tensor values, Tensor positions, Tensor? bias=None, Tensor? residual=None,"
      " Tensor? rotation=None, Tensor? compressed=None) -> Tensor",
      tags);
  m.def(
      "sparse24_experts(Tensor x, Tensor values, Tensor positions, Tensor ends, Tensor? bias=None) -> Tensor",
      tags);
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor q_out, Tensor k_out)", tags);
  m.def("swiglu_rotate(Tensor gate, Tensor up, Tensor? rotation=None, Tensor? ends=None) -> Tensor", tags);
  m.def("sparse24_compress(Tensor values, Tensor positions) -> Tensor", tags);

  // The checks of the ops whose CPU kernel is their reference in Python (drot/ops/registration.py).
  m.def("check_skew_momentum(Tensor product, Tensor momentum, float decay, float? square_decay=None) -> ()",
        &drot::check_skew_momentum);
  m.def("check_polar_start(Tensor squared, Tensor fourth, float a, float b, float c, float margin) -> ()",
        &drot::check_polar_start);
  m.def("check_turn_start(Tensor j, Tensor angle, Tensor? scale=None) -> ()", &drot::check_turn_start);
  m.def(
      "check_spectral_step(Tensor q, Tensor momentum, Tensor gradient, Tensor unit, Tensor angle,"
      " float decay, float[] polynomials, float margin) -> ()",
      &drot::check_spectral_step);
}

// These raise in a backward pass, where torch would warn and give no gradient. The formula is registered here
// because one registered in Python takes longer than a small product.
TORCH_LIBRARY_IMPL(drot, Autograd, m) {
  for (const char* op :
       {"sparse24_linear", "sparse24_experts", "pack24", "unpack24", "cholesky_qr", "rope"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

namespace {

// Versions and options of this build as text; "" for what the build does not have.
pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = DROT_VERSION;
  info["torch"] = DROT_TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cuda"] = DROT_CUDA_VERSION;
  info["cuda_architectures"] = DROT_CUDA_ARCHITECTURES;
  info["no_cuda_reason"] = DROT_NO_CUDA_REASON;
  info["cusparselt"] = DROT_CUSPARSELT_VERSION;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of drot; importing it registers torch.ops.drot.*";
  m.def("build_info", &build_info, "Versions and options of this build: a dict of str.");
  m.def("cpu_instructions", &drot::cpu_instructions,
        "The instructions that the CPU kernels use in this process, such as \"AVX512 BF16 AMX\".");
  m.def("tuning_cache_file", &drot::tuning_cache::file,
        "Path of the tuning cache, \"\" where nothing is cached.");
  m.def("tuning_cache_lookup", &drot::tuning_cache::lookup, pybind11::arg("key"),
        "The value that the tuning cache holds for a key, or None.");
  m.def("tuning_cache_store", &drot::tuning_cache::store, pybind11::arg("key"), pybind11::arg("value"),
        "Writes a key and its value to the tuning cache; returns whether that was possible.");
}
