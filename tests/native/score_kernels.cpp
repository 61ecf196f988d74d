// The CUDA kernels of entropy_loss and pruned_importance on CPU threads, for test_score_kernels.py.
#include "cuda_on_host.h"
//
#include "ops/cuda/entropy_loss_passes.cuh"
#include "ops/cuda/pruned_importance_groups.cuh"

using namespace drot;

namespace {

template <class T>
double added(const std::vector<double>& losses, T scale) {
  T loss = 0;
  host::launch({1}, {1024}, [&] { sum_losses<T>(losses.data(), losses.size(), scale, &loss); });
  return loss;
}

template <class T>
void add_up(const std::vector<T>& partial, int64_t rows, int64_t columns, T* out) {
  host::launch({static_cast<unsigned>((columns + kSumTile - 1) / kSumTile)}, {kSumTile, kSumTile},
               [&] { sum_columns<T>(partial.data(), rows, columns, out); });
}

template <class T>
double held(const T* y, const T* m, int64_t rows, int64_t columns, double scale, T* dy, T* dm) {
  constexpr unsigned kBlocks = 3, kThreads = 128;
  const EntropyProblem<T> p{y, m, rows, columns, scale, dy};
  std::vector<double> losses(kBlocks);
  std::vector<T> partial(kBlocks * columns);
  host::launch({kBlocks}, {kThreads}, [&] {
    m ? entropy_held_rows<T, kThreads, 8, true>(p, losses.data(), partial.data())
      : entropy_held_rows<T, kThreads, 8, false>(p, losses.data(), nullptr);
  });
  if (m) add_up(partial, kBlocks, columns, dm);
  return added<T>(losses, scale);
}

template <class T, int kVec>
double passes(const T* y, const T* m, int64_t rows, int64_t columns, bool by_row, bool by_column,
              int64_t chunk, double scale, T* dy, T* dm) {
  const EntropyProblem<T> p{y, m, rows, columns, scale, dy};
  const int64_t chunks = (rows + chunk - 1) / chunk;
  const Dim3 grid{static_cast<unsigned>((columns + kVec * kPassThreads - 1) / (kVec * kPassThreads)),
                  static_cast<unsigned>(chunks)};
  const unsigned row_blocks = by_row ? 2 : 0,
                 column_blocks = by_column ? (columns + kSumTile - 1) / kSumTile : 0;
  std::vector<double> losses(row_blocks + column_blocks + grid.x * grid.y);
  std::vector<T> of_rows(2 * rows), of_columns(2 * columns), z(chunks * columns), t(chunks * columns);
  Groups<T> row, column;
  if (by_row) {
    row = {of_rows.data(), of_rows.data() + rows};
    host::launch({row_blocks}, {kPassThreads}, [&] { row_sums<T, kVec>(p, row, losses.data()); });
  }
  if (by_column) {
    column = {of_columns.data(), of_columns.data() + columns};
    host::launch(grid, {kPassThreads}, [&] { column_sums<T, kVec>(p, chunk, z.data(), t.data()); });
    host::launch({column_blocks}, {kSumTile, kSumTile}, [&] {
      close_columns<T>(z.data(), t.data(), chunks, columns, scale, column, losses.data() + row_blocks);
    });
  }
  std::vector<T> partial(chunks * columns);
  host::launch(grid, {kPassThreads}, [&] {
    gradient<T, kVec>(p, chunk, row, column, m ? partial.data() : nullptr,
                      losses.data() + row_blocks + column_blocks);
  });
  if (m) add_up(partial, chunks, columns, dm);
  return added<T>(losses, scale);
}

template <class T, int kGroup>
double pruned(const T* y, const T* m, const bool* removed, int64_t rows, int64_t columns, int prune,
              int group, int64_t chunk, double scale, T* dy, T* dm) {
  const int64_t chunks = (rows + chunk - 1) / chunk;
  const Dim3 grid{static_cast<unsigned>((columns / group + kGroupThreads - 1) / kGroupThreads),
                  static_cast<unsigned>(chunks)};
  std::vector<double> losses(grid.x * grid.y);
  std::vector<T> partial(chunks * columns);
  const PrunedProblem<T> p{y,
                           m,
                           removed,
                           rows,
                           columns,
                           chunk,
                           group,
                           prune,
                           static_cast<T>(scale),
                           dy,
                           m ? partial.data() : nullptr,
                           losses.data()};
  host::launch(grid, {kGroupThreads}, [&] {
    if constexpr (kGroup > 0) {
      pruned_groups<T, kGroup>(p);
    } else {
      pruned_any_groups<T>(p);
    }
  });
  if (m) add_up(partial, chunks, columns, dm);
  return added<T>(losses, scale);
}

}  // namespace

#define EXPORT(T, name)                                                                                      \
  extern "C" double held_##name(const T* y, const T* m, int64_t rows, int64_t columns, double scale, T* dy,  \
                                T* dm) {                                                                     \
    return held<T>(y, m, rows, columns, scale, dy, dm);                                                      \
  }                                                                                                          \
  extern "C" double passes_##name(const T* y, const T* m, int64_t rows, int64_t columns, bool by_row,        \
                                  bool by_column, bool vectors, int64_t chunk, double scale, T* dy, T* dm) { \
    return vectors ? passes<T, kVec<T>>(y, m, rows, columns, by_row, by_column, chunk, scale, dy, dm)        \
                   : passes<T, 1>(y, m, rows, columns, by_row, by_column, chunk, scale, dy, dm);             \
  }                                                                                                          \
  extern "C" double pruned_##name(const T* y, const T* m, const bool* removed, int64_t rows,                 \
                                  int64_t columns, int prune, int group, bool any, int64_t chunk,            \
                                  double scale, T* dy, T* dm) {                                              \
    const auto run = any          ? pruned<T, 0>                                                             \
                     : group == 1 ? pruned<T, 1>                                                             \
                     : group == 2 ? pruned<T, 2>                                                             \
                     : group == 4 ? pruned<T, 4>                                                             \
                                  : pruned<T, 8>;                                                            \
    return run(y, m, removed, rows, columns, prune, group, chunk, scale, dy, dm);                            \
  }

EXPORT(float, float32)
EXPORT(double, float64)
