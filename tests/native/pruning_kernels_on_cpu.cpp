// The kernels and the launch code of sparsegpt_sweep, nm_mask, pack24 and unpack24 on a CPU (block_on_cpu.h),
// for test_pruning_kernels_on_cpu.py. The functions take plain pointers and return "" or an error message.
// `backwards` is the order of the threads.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <string>

#include "block_on_cpu.h"
#include "ops/cuda/nm_mask_groups.cuh"
#include "ops/cuda/nm_mask_rows.cuh"
#include "ops/cuda/pack24_bytes.cuh"
#include "ops/cuda/sparsegpt_sweep_rows.cuh"

// What Launcher::shared_memory() returns on the GPUs that have least.
constexpr int64_t kSharedMemory = 98 * 1024;

namespace drot {
thread_local uint4 dynamic_shared[kSharedMemory / sizeof(uint4)];
}

namespace {

std::string message;

template <class Work>
const char* run(bool backwards, int multiprocessors, Work work) {
  on_cpu::backwards = backwards;
  message.clear();
  try {
    on_cpu::Launcher launcher(multiprocessors, kSharedMemory, drot::dynamic_shared);
    work(launcher);
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

template <class Work>
void with_float_or_double(const std::string& dtype, Work work) {
  if (dtype == "float32") work(float{});
  if (dtype == "float64") work(double{});
}

template <class Work>
void with_any_float(const std::string& dtype, Work work) {
  if (dtype == "float16") work(c10::Half{});
  if (dtype == "bfloat16") work(c10::BFloat16{});
  with_float_or_double(dtype, work);
}

template <class Work>
void with_word(const std::string& dtype, Work work) {
  if (dtype == "float32") {
    work(uint32_t{});
  } else {
    work(uint16_t{});
  }
}

}  // namespace

extern "C" int sweep_widest(const char* dtype) {
  int widest = 0;
  with_float_or_double(dtype, [&](auto of_type) { widest = drot::kSweepWidest<decltype(of_type)>; });
  return widest;
}

// Args: the members of SweepProblem. dtype: of w. The matrices of a batch lie one below the other.
extern "C" const char* sweep(bool backwards, const char* dtype, const void* w, const void* hinv,
                             const bool* given, void* w_out, void* err, bool* removed, int64_t w_stride,
                             int64_t hinv_stride, int64_t out_stride, int64_t rows, int64_t columns,
                             int64_t prune, int64_t group, int64_t batch) {
  return run(backwards, /*multiprocessors=*/3, [&](auto& launcher) {
    with_float_or_double(dtype, [&](auto of_type) {
      using T = decltype(of_type);
      drot::run_sweep<T>(launcher, {.w = static_cast<const T*>(w),
                                    .w_stride = w_stride,
                                    .hinv = static_cast<const T*>(hinv),
                                    .hinv_stride = hinv_stride,
                                    .given = given,
                                    .w_out = static_cast<T*>(w_out),
                                    .err = static_cast<T*>(err),
                                    .removed = removed,
                                    .out_stride = out_stride,
                                    .rows = rows,
                                    .columns = static_cast<int>(columns),
                                    .prune = static_cast<int>(prune),
                                    .group = static_cast<int>(group),
                                    .batch = static_cast<int>(batch),
                                    .w_step = rows * w_stride,
                                    .hinv_step = columns * hinv_stride,
                                    .out_step = rows * out_stride});
    });
  });
}

// Args: those of run_mask_groups. dtype: of score.
extern "C" const char* mask_groups(bool backwards, const char* dtype, const void* score, bool* removed,
                                   int64_t groups, int64_t group, int64_t prune) {
  return run(backwards, /*multiprocessors=*/1, [&](auto& launcher) {
    with_any_float(dtype, [&](auto of_type) {
      drot::run_mask_groups(launcher, static_cast<const decltype(of_type)*>(score), groups,
                            static_cast<int>(group), static_cast<int>(prune), removed);
    });
  });
}

// Args: those of run_mask_rows. dtype: of score.
extern "C" const char* mask_rows(bool backwards, const char* dtype, const void* score, bool* removed,
                                 int64_t rows, int64_t columns, int64_t prune) {
  return run(backwards, /*multiprocessors=*/3, [&](auto& launcher) {
    with_any_float(dtype, [&](auto of_type) {
      drot::run_mask_rows(launcher, static_cast<const decltype(of_type)*>(score), rows,
                          static_cast<int>(columns), static_cast<int>(prune), removed);
    });
  });
}

// Args: those of run_pack24. dtype: of w.
extern "C" const char* pack24(bool backwards, const char* dtype, const void* w, void* values,
                              uint8_t* positions, int64_t* bad, int64_t bytes, int64_t bytes_per_row) {
  return run(backwards, /*multiprocessors=*/3, [&](auto& launcher) {
    with_word(dtype, [&](auto of_type) {
      using Word = decltype(of_type);
      drot::run_pack24(launcher, static_cast<const Word*>(w), static_cast<Word*>(values), positions, bytes,
                       bytes_per_row, bad);
    });
  });
}

// Args: those of run_unpack24. dtype: of w.
extern "C" const char* unpack24(bool backwards, const char* dtype, const void* values,
                                const uint8_t* positions, void* w, int64_t* bad, int64_t bytes,
                                int64_t bytes_per_row) {
  return run(backwards, /*multiprocessors=*/3, [&](auto& launcher) {
    with_word(dtype, [&](auto of_type) {
      using Word = decltype(of_type);
      drot::run_unpack24(launcher, static_cast<const Word*>(values), positions, static_cast<Word*>(w), bytes,
                         bytes_per_row, bad);
    });
  });
}
