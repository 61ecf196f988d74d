// The kernel of sparse24_linear for few tokens on the CPU (block_on_cpu.h), for test_sparse24_skinny.py.
#include "block_on_cpu.h"
//
#include "mma_on_host.h"
//
#include "ops/cuda/sparse24_skinny.cuh"

extern "C" void skinny(const uint16_t* x, const uint16_t* values, const uint8_t* positions,
                       const uint16_t* bias, const uint16_t* residual, const uint16_t* rotation, uint16_t* y,
                       int64_t in, int64_t out, int64_t tokens, int64_t processors) {
  on_cpu::Gpu gpu(static_cast<int>(processors), 0, {});
  drot::run_sparse24_skinny<on_cpu::Bf16>(
      gpu, {x, values, positions, bias, residual, rotation, y, in, out, static_cast<int>(tokens)});
}
