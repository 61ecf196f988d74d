// The kernel of rope on the CPU (block_on_cpu.h), for test_rope_on_cpu.py.
#include "block_on_cpu.h"
//
#include "ops/cuda/rope_tokens.cuh"

namespace {

// sizes: the strides of q, k, cosine and sine, then the last five members of RopeProblem.
template <class T>
void run(void* const* tensors, const int64_t* sizes, bool backwards) {
  on_cpu::backwards = backwards;
  on_cpu::Launcher launcher(/*multiprocessors=*/1, /*shared_memory=*/0, {});
  const auto strides = [&](int i) {
    return drot::RopeStrides{sizes[3 * i], sizes[3 * i + 1], sizes[3 * i + 2]};
  };
  drot::run_rope(launcher, drot::RopeProblem<T>{.q = static_cast<const T*>(tensors[0]),
                                                .k = static_cast<const T*>(tensors[1]),
                                                .cosine = static_cast<const T*>(tensors[2]),
                                                .sine = static_cast<const T*>(tensors[3]),
                                                .q_out = static_cast<T*>(tensors[4]),
                                                .k_out = static_cast<T*>(tensors[5]),
                                                .q_strides = strides(0),
                                                .k_strides = strides(1),
                                                .cosine_strides = strides(2),
                                                .sine_strides = strides(3),
                                                .batch = sizes[12],
                                                .tokens = sizes[13],
                                                .q_heads = sizes[14],
                                                .k_heads = sizes[15],
                                                .half = sizes[16]});
}

}  // namespace

extern "C" void rope_float(void* const* tensors, const int64_t* sizes, bool backwards) {
  run<float>(tensors, sizes, backwards);
}

extern "C" void rope_bf16(void* const* tensors, const int64_t* sizes, bool backwards) {
  run<c10::BFloat16>(tensors, sizes, backwards);
}

extern "C" void rope_fp16(void* const* tensors, const int64_t* sizes, bool backwards) {
  run<c10::Half>(tensors, sizes, backwards);
}
