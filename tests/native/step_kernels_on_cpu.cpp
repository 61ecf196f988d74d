// The kernels and the launch code of column_scale, column_scale_backward and turn_start on a CPU
// (block_on_cpu.h), for test_step_kernels_on_cpu.py. The functions take plain pointers and return "" or an
// error message. Their arguments are the members of the problems, and the order of the threads.
#include <c10/util/BFloat16.h>

#include <string>

#include "block_on_cpu.h"
#include "ops/cuda/column_scale_strips.cuh"
#include "ops/cuda/turn_start_tiles.cuh"

namespace {

using BF16 = c10::BFloat16;

std::string message;

// Refuses a second launch: each op is one kernel.
struct OneLaunch : on_cpu::Launcher {
  using on_cpu::Launcher::Launcher;

  template <class... P>
  void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes,
              std::type_identity_t<P>... args) {
    if (launched) throw std::runtime_error("more than one launch");
    launched = true;
    on_cpu::Launcher::launch(kernel, grid, block, shared_bytes, args...);
  }

  bool launched = false;
};

template <class Work>
const char* run(bool backwards, Work work) {
  on_cpu::backwards = backwards;
  message.clear();
  try {
    OneLaunch launcher(/*multiprocessors=*/3, /*shared_memory=*/0, {});
    work(launcher);
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace

extern "C" const char* column_scale(bool backwards, const void* product, float* out, int64_t count,
                                    int64_t rows, int64_t n, bool inverse) {
  return run(backwards, [&](auto& launcher) {
    drot::run_column_scale(launcher, {.product = static_cast<const BF16*>(product),
                                      .out = out,
                                      .count = count,
                                      .rows = rows,
                                      .n = n,
                                      .inverse = inverse});
  });
}

extern "C" const char* column_scale_backward(bool backwards, const void* product, const float* value,
                                             const float* gradient, void* out, int64_t count, int64_t rows,
                                             int64_t n, bool inverse) {
  return run(backwards, [&](auto& launcher) {
    drot::run_column_scale_backward(launcher, {.product = static_cast<const BF16*>(product),
                                               .value = value,
                                               .gradient = gradient,
                                               .out = static_cast<BF16*>(out),
                                               .count = count,
                                               .rows = rows,
                                               .n = n,
                                               .inverse = inverse});
  });
}

extern "C" const char* turn_start(bool backwards, const void* j, const float* angle, const void* scale,
                                  void* change, void* scaled, int64_t count, int64_t n, int64_t stride) {
  return run(backwards, [&](auto& launcher) {
    drot::run_turn_start(launcher, {.j = static_cast<const BF16*>(j),
                                    .angle = angle,
                                    .scale = stride ? static_cast<const BF16*>(scale) : nullptr,
                                    .stride = stride,
                                    .change = static_cast<BF16*>(change),
                                    .scaled = static_cast<BF16*>(scaled),
                                    .count = count,
                                    .n = n});
  });
}
