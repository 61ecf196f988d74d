// Chooses the kernels of a call of entropy_loss; used by entropy_loss.cu. The launcher's type is a template
// parameter, so that tests/native can run the kernels on a CPU (common/cuda/launcher.cuh).
#pragma once

#include <type_traits>

#include "ops/cuda/entropy_loss_columns.cuh"
#include "ops/cuda/entropy_loss_long_rows.cuh"
#include "ops/cuda/entropy_loss_rows.cuh"

namespace drot {

// y is read 16 bytes at a time if every row is aligned to 16 bytes, else value by value.
// rows, columns: whether the entropies of the rows, and of the columns, are part of the loss.
template <class T, class LauncherT>
void run_entropy_loss(LauncherT& launcher, const EntropyProblem<T>& a, bool rows, bool columns) {
  const auto with_column_scale = [&](auto vec, auto scaled) {
    constexpr int kVec = decltype(vec)::value;
    constexpr bool kScaled = decltype(scaled)::value;
    if (columns && rows) return launch_entropy_columns<T, kVec, kScaled, true>(launcher, a);
    if (columns) return launch_entropy_columns<T, kVec, kScaled, false>(launcher, a);
    if constexpr (kVec > 1) {
      if (a.columns <= kWidestInRegisters<T>) {
        return launch_entropy_rows_in_registers<T, kScaled>(launcher, a);
      }
    }
    return launch_entropy_long_rows<T, kVec, kScaled>(launcher, a);
  };
  const auto with_vec = [&](auto vec) {
    return a.column_scale != nullptr ? with_column_scale(vec, std::true_type{})
                                     : with_column_scale(vec, std::false_type{});
  };
  return a.vectorizable() ? with_vec(std::integral_constant<int, kVectorSize<T>>{})
                          : with_vec(std::integral_constant<int, 1>{});
}

}  // namespace drot
