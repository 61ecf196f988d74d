// The kernels of swiglu_rotate on the CPU (block_on_cpu.h), for test_swiglu_rotate_on_cpu.py.
#include "block_on_cpu.h"
//
#include "async_copy_on_host.h"
//
#include "mma_on_host.h"
//
#include "ops/cuda/swiglu_rotate_tiles.cuh"

template <class T>
drot::SwigluProblem<T> problem(const T* gate, const T* up, const T* rotation, T* out, const int64_t* sizes,
                               const int32_t* ends, int64_t experts) {
  return {.gate = gate,
          .up = up,
          .rotation = rotation,
          .out = out,
          .gate_stride = sizes[0],
          .up_stride = sizes[1],
          .tokens = sizes[2],
          .blocks = sizes[3],
          .size = sizes[4],
          .experts = {.ends = ends, .experts = static_cast<int>(experts), .rows = sizes[2]}};
}

// sizes: the last five members of SwigluProblem. backwards: the order in which the threads of a block run.
// early: whether copies arrive at once. ends: of each of `experts` experts; null without them.
extern "C" void swiglu_bf16(const uint16_t* gate, const uint16_t* up, const uint16_t* rotation, uint16_t* out,
                            const int64_t* sizes, int64_t backwards, int64_t early, const int32_t* ends,
                            int64_t experts) {
  on_cpu::backwards = backwards != 0;
  on_cpu::early = early != 0;
  on_cpu::Launcher launcher(/*multiprocessors=*/1, /*shared_memory=*/0, {});
  drot::run_swiglu_rotate_16<on_cpu::Bf16>(launcher, problem(gate, up, rotation, out, sizes, ends, experts));
}

extern "C" void swiglu_float(const float* gate, const float* up, const float* rotation, float* out,
                             const int64_t* sizes, int64_t backwards, int64_t, const int32_t* ends,
                             int64_t experts) {
  on_cpu::backwards = backwards != 0;
  on_cpu::Launcher launcher(/*multiprocessors=*/1, /*shared_memory=*/0, {});
  drot::run_swiglu_rotate_float(launcher, problem(gate, up, rotation, out, sizes, ends, experts));
}
