// Which kernels of entropy_loss a call takes. It knows the GPU by class Gpu (gpu.cuh) alone, so that a test
// can run it on a CPU.
#pragma once

#include <type_traits>

#include "ops/cuda/entropy_loss_columns.cuh"
#include "ops/cuda/entropy_loss_long_rows.cuh"
#include "ops/cuda/entropy_loss_rows.cuh"

namespace drot {

// y is read 16 bytes at a time where every row can be, else value by value.
template <class T, class Gpu>
void run_entropy_loss(Gpu& gpu, const EntropyProblem<T>& a, bool rows, bool columns) {
  const auto with_factor = [&](auto vec, auto factor) {
    constexpr int kVec = decltype(vec)::value;
    constexpr bool kFactor = decltype(factor)::value;
    if (columns && rows) return launch_entropy_columns<T, kVec, kFactor, true>(gpu, a);
    if (columns) return launch_entropy_columns<T, kVec, kFactor, false>(gpu, a);
    if constexpr (kVec > 1) {
      if (a.columns <= kWidestInRegisters<T>) return launch_entropy_rows_in_registers<T, kFactor>(gpu, a);
    }
    return launch_entropy_long_rows<T, kVec, kFactor>(gpu, a);
  };
  const auto with_vec = [&](auto vec) {
    return a.m != nullptr ? with_factor(vec, std::true_type{}) : with_factor(vec, std::false_type{});
  };
  return a.wide() ? with_vec(std::integral_constant<int, kWide<T>>{})
                  : with_vec(std::integral_constant<int, 1>{});
}

}  // namespace drot
