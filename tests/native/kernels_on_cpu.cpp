// The kernels of entropy_loss and pruned_importance with their launch code, for a CPU (block_on_cpu.h).
// Called by test_kernels_on_cpu.py: plain pointers in, "" or a message out.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <string>

#include "block_on_cpu.h"
#include "ops/cuda/entropy_loss_launch.cuh"
#include "ops/cuda/pruned_importance_groups.cuh"

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

// once: y turns into NaN at the first barrier, which shows what is read after it.
extern "C" const char* entropy_loss(const char* dtype, int processors, int64_t shared_memory, bool backwards,
                                    bool once, void* y, const void* m, int64_t rows, int64_t columns,
                                    bool by_row, bool by_column, double scale, void* dy, void* dm,
                                    void* loss) {
  return run(dtype, backwards, [&](auto of_type) {
    using T = decltype(of_type);
    using Math = at::opmath_type<T>;
    if (once) on_cpu::at_barrier = [=] { std::memset(y, 0xff, rows * columns * sizeof(T)); };
    on_cpu::Gpu gpu(processors, shared_memory, drot::dynamic_shared);
    const drot::EntropyProblem<T> problem{
        static_cast<const T*>(y), static_cast<const Math*>(m), rows, columns, scale, static_cast<T*>(dy),
        static_cast<Math*>(dm),   static_cast<Math*>(loss)};
    drot::run_entropy_loss(gpu, problem, by_row, by_column);
  });
}

extern "C" const char* pruned_importance(const char* dtype, int processors, bool backwards, const void* y,
                                         const void* m, const bool* removed, int64_t rows, int64_t columns,
                                         int group, int prune, double scale, void* dy, void* dm, void* loss) {
  return run(dtype, backwards, [&](auto of_type) {
    using T = decltype(of_type);
    using Math = at::opmath_type<T>;
    on_cpu::Gpu gpu(processors, 0, {});
    const drot::PrunedProblem<T> problem{static_cast<const T*>(y),
                                         static_cast<const Math*>(m),
                                         removed,
                                         rows,
                                         columns,
                                         group,
                                         prune,
                                         scale,
                                         static_cast<T*>(dy),
                                         static_cast<Math*>(dm),
                                         static_cast<Math*>(loss)};
    drot::run_pruned_importance(gpu, problem);
  });
}
