// The kernels and the launch code of entropy_loss, pruned_importance, skew_momentum and
// polar_start on a CPU (block_on_cpu.h), for test_kernels_on_cpu.py. The functions take plain pointers and
// return "" or an error message.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <string>

#include "block_on_cpu.h"
#include "ops/cuda/entropy_loss_launch.cuh"
#include "ops/cuda/polar_start_rows.cuh"
#include "ops/cuda/pruned_importance_groups.cuh"
#include "ops/cuda/skew_momentum_tiles.cuh"

namespace drot {
thread_local uint4 dynamic_shared[1 << 14];
}

namespace {

std::string message;

template <class Work>
const char* run(const char* dtype, bool backwards, Work work) {
  on_cpu::backwards = backwards;
  on_cpu::at_barrier = nullptr;
  message.clear();
  try {
    const std::string name = dtype;
    if (name == "float32") work(float{});
    if (name == "float64") work(double{});
    if (name == "bfloat16") work(c10::BFloat16{});
    if (name == "float16") work(c10::Half{});
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace

// Args:
//   dtype: of y and dy.
//   multiprocessors, shared_memory: sizes of the simulated GPU.
//   backwards: order of the threads.
//   once: y becomes NaN at the first barrier, so that reading y again after it gives NaN.
//   y …: the members of EntropyProblem.
//   by_row, by_column: whose entropies are added.
extern "C" const char* entropy_loss(const char* dtype, int multiprocessors, int64_t shared_memory,
                                    bool backwards, bool once, void* y, const void* column_scale,
                                    int64_t rows, int64_t columns, bool by_row, bool by_column, double scale,
                                    void* dy, void* dcolumn_scale, void* loss) {
  return run(dtype, backwards, [&](auto of_type) {
    using T = decltype(of_type);
    using Math = at::opmath_type<T>;
    if (once) on_cpu::at_barrier = [=] { std::memset(y, 0xff, rows * columns * sizeof(T)); };
    on_cpu::Launcher launcher(multiprocessors, shared_memory, drot::dynamic_shared);
    const drot::EntropyProblem<T> problem{.y = static_cast<const T*>(y),
                                          .column_scale = static_cast<const Math*>(column_scale),
                                          .rows = rows,
                                          .columns = columns,
                                          .scale = scale,
                                          .dy = static_cast<T*>(dy),
                                          .dcolumn_scale = static_cast<Math*>(dcolumn_scale),
                                          .loss = static_cast<Math*>(loss)};
    drot::run_entropy_loss(launcher, problem, by_row, by_column);
  });
}

// Args: as above, and the members of PrunedProblem.
extern "C" const char* pruned_importance(const char* dtype, int multiprocessors, bool backwards,
                                         const void* y, const void* column_scale, const bool* removed,
                                         int64_t rows, int64_t columns, int group, int prune, double scale,
                                         void* dy, void* dcolumn_scale, void* loss) {
  return run(dtype, backwards, [&](auto of_type) {
    using T = decltype(of_type);
    using Math = at::opmath_type<T>;
    on_cpu::Launcher launcher(multiprocessors, /*shared_memory=*/0, {});
    const drot::PrunedProblem<T> problem{.y = static_cast<const T*>(y),
                                         .column_scale = static_cast<const Math*>(column_scale),
                                         .removed = removed,
                                         .rows = rows,
                                         .columns = columns,
                                         .group = group,
                                         .prune = prune,
                                         .scale = scale,
                                         .dy = static_cast<T*>(dy),
                                         .dcolumn_scale = static_cast<Math*>(dcolumn_scale),
                                         .loss = static_cast<Math*>(loss)};
    drot::run_pruned_importance(launcher, problem);
  });
}

// Args: the members of SkewMomentumProblem.
extern "C" const char* skew_momentum(bool backwards, const void* product, void* momentum, void* out,
                                     int64_t count, int64_t n, float decay, bool adam, float square_decay) {
  return run("bfloat16", backwards, [&](auto) {
    on_cpu::Launcher launcher(/*multiprocessors=*/3, /*shared_memory=*/0, {});
    drot::run_skew_momentum(launcher, {.product = static_cast<const c10::BFloat16*>(product),
                                       .momentum = static_cast<c10::BFloat16*>(momentum),
                                       .out = static_cast<c10::BFloat16*>(out),
                                       .count = count,
                                       .n = n,
                                       .decay = decay,
                                       .adam = adam,
                                       .square_decay = square_decay});
  });
}

// Args: the members of PolarStartProblem.
extern "C" const char* polar_start(bool backwards, const void* squared, const void* fourth, void* out,
                                   int64_t count, int64_t n, float a, float b, float c, float margin) {
  return run("bfloat16", backwards, [&](auto) {
    on_cpu::Launcher launcher(/*multiprocessors=*/3, /*shared_memory=*/0, {});
    drot::run_polar_start(launcher, {.squared = static_cast<const c10::BFloat16*>(squared),
                                     .fourth = static_cast<const c10::BFloat16*>(fourth),
                                     .out = static_cast<c10::BFloat16*>(out),
                                     .count = count,
                                     .n = n,
                                     .k = {a, b, c, margin}});
  });
}
