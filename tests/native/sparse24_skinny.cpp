// The skinny kernel of sparse24_linear on the CPU (block_on_cpu.h), for test_sparse24_skinny.py.
#include "block_on_cpu.h"
//
#include "mma_on_host.h"
//
#include "ops/cuda/sparse24_skinny.cuh"

// Args: the members of SkinnyProblem, and the multiprocessors of the simulated GPU.
extern "C" void skinny(const uint16_t* x, const uint16_t* values, const uint8_t* positions,
                       const uint16_t* bias, const uint16_t* residual, const uint16_t* rotation, uint16_t* y,
                       int64_t in, int64_t out, int64_t tokens, int64_t multiprocessors) {
  on_cpu::Launcher launcher(static_cast<int>(multiprocessors), /*shared_memory=*/0, {});
  drot::run_sparse24_skinny<on_cpu::Bf16>(launcher, {.x = x,
                                                     .values = values,
                                                     .positions = positions,
                                                     .bias = bias,
                                                     .residual = residual,
                                                     .rotation = rotation,
                                                     .y = y,
                                                     .in = in,
                                                     .out = out,
                                                     .tokens = static_cast<int>(tokens)});
}
