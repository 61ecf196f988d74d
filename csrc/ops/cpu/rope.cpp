#include "ops/rope.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "ops/cpu/rope_simd.h"

namespace drot {
namespace {

constexpr int64_t kPairsOfAThread = 16384;  // which a core turns while a thread of its own starts

template <class T>
void run(const RopeProblem<T>& p) {
  const int64_t heads = p.q_heads + p.k_heads, grain = kPairsOfAThread / (heads * p.half + 1) + 1;
  at::parallel_for(0, p.batch * p.tokens, grain, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      const int64_t batch = at / p.tokens, token = at % p.tokens;
      const auto start = [&](const RopeStrides& s, int64_t head) {
        return batch * s.batch + head * s.head + token * s.token;
      };
      const T* const cosine = p.cosine + start(p.cosine_strides, 0);
      const T* const sine = p.sine + start(p.sine_strides, 0);
      const auto turn = [&](const T* in, const RopeStrides& strides, T* out, int64_t count) {
        for (int64_t head = 0; head < count; ++head) {
          DROT_SIMD_CALL(rope_head)
          (in + start(strides, head), cosine, sine, out + (at * count + head) * 2 * p.half, p.half);
        }
      };
      turn(p.q, p.q_strides, p.q_out, p.q_heads);
      turn(p.k, p.k_strides, p.k_out, p.k_heads);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> rope_cpu(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& cosine, const at::Tensor& sine) {
  check_rope(q, k, cosine, sine);
  at::Tensor q_out = rope_result(q), k_out = rope_result(k);
  const at::Tensor in[] = {rope_rows(q), rope_rows(k), rope_rows(cosine), rope_rows(sine)};
  switch (q.scalar_type()) {
    case at::kFloat:
      run(rope_problem<float>(in[0], in[1], in[2], in[3], q_out, k_out));
      break;
    case at::kBFloat16:
      run(rope_problem<Bf16>(in[0], in[1], in[2], in[3], q_out, k_out));
      break;
    default:
      run(rope_problem<Fp16>(in[0], in[1], in[2], in[3], q_out, k_out));
  }
  return {q_out.transpose(1, 2), k_out.transpose(1, 2)};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("rope", &rope_cpu); }

}  // namespace drot
