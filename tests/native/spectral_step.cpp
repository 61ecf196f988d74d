// The kernel of spectral_step on the CPU (block_on_cpu.h), for test_spectral_step_on_cpu.py.
#include <string>

#include "block_on_cpu.h"
//
#include "mma_on_host.h"
//
#include "ops/cuda/spectral_step_block.cuh"

namespace drot {
thread_local uint4 dynamic_shared[1 << 14];
}

// Returns "" or an error message.
//
// Args:
//   backwards: order of the threads.
//   shared_memory: bytes that a block of the simulated GPU has.
//   q …: the members of SpectralStepProblem.
//   coefficients, numbers, margin: of the polynomials, as the op takes them.
extern "C" const char* spectral_step(bool backwards, int64_t shared_memory, float* q, uint16_t* momentum,
                                     const float* gradient, const float* unit, const float* angle,
                                     int64_t count, int64_t n, double decay, const double* coefficients,
                                     int64_t numbers, double margin) {
  static std::string message;
  on_cpu::backwards = backwards;
  message.clear();
  try {
    on_cpu::Launcher launcher(/*multiprocessors=*/3, shared_memory, drot::dynamic_shared);
    drot::run_spectral_step<on_cpu::Bf16>(
        launcher,
        {.q = q,
         .momentum = momentum,
         .gradient = gradient,
         .unit = unit,
         .angle = angle,
         .count = count,
         .n = static_cast<int>(n),
         .decay = static_cast<float>(decay),
         .polynomials = drot::spectral_polynomials(coefficients, static_cast<size_t>(numbers), margin)});
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
