// rope on the GPU: the op. Its kernel is in rope_tokens.cuh.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/rope_tokens.cuh"
#include "ops/rope.h"

namespace drot {
namespace {

std::tuple<at::Tensor, at::Tensor> rope_cuda(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& cosine, const at::Tensor& sine) {
  check_rope(q, k, cosine, sine);
  const c10::cuda::CUDAGuard guard(q.device());
  at::Tensor q_out = rope_result(q), k_out = rope_result(k);
  if (q_out.numel() + k_out.numel() > 0) {
    TORCH_CHECK_VALUE(q.size(0) * q.size(2) <= INT32_MAX && (q.size(1) + k.size(1)) * q.size(3) <= INT32_MAX,
                      "q must have less than 2^31 tokens, got ", q.sizes());
    const at::Tensor in[] = {rope_rows(q), rope_rows(k), rope_rows(cosine), rope_rows(sine)};
    Launcher launcher(in[0]);
    switch (q.scalar_type()) {
      case at::kFloat:
        run_rope(launcher, rope_problem<float>(in[0], in[1], in[2], in[3], q_out, k_out));
        break;
      case at::kBFloat16:
        run_rope(launcher, rope_problem<c10::BFloat16>(in[0], in[1], in[2], in[3], q_out, k_out));
        break;
      default:
        run_rope(launcher, rope_problem<c10::Half>(in[0], in[1], in[2], in[3], q_out, k_out));
    }
  }
  return {q_out.transpose(1, 2), k_out.transpose(1, 2)};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("rope", &rope_cuda); }

}  // namespace drot
