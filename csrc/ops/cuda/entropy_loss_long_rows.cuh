// entropy_loss of rows that are too long for entropy_loss_rows.cuh, or not aligned; used by
// entropy_loss_launch.cuh. One block holds a row: its first part in registers, the next part in shared
// memory. Only the rest, if any, is read twice. dy is written once.
//
// Rows of up to so many columns are read once, with the shared memory of sm_80 (sm_90):
//   fp16, bf16  132,096 (164,864); not aligned 107,520 (140,288)
//   fp32         66,048  (82,432)
//   fp64         33,024  (41,216)
//
// The sums of dcolumn_scale are in shared memory if the row leaves room for them: up to 41,472 (54,952)
// columns in fp16 and bf16, 33,024 (41,216) in fp32, 16,512 (20,608) in fp64. Longer rows keep the sums in
// global memory, or its cache, and read and write them for every row: 8 bytes per weight, 16 in fp64.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/static_shared.cuh"
#include "ops/cuda/entropy_loss_rows.cuh"

namespace drot {

// Vectors that a thread holds in registers: they take 48 of its 128 registers.
template <class T, int kVec>
constexpr int kHeld = static_cast<int>(48 * 4 / (sizeof(T) * kVec < 4 ? 4 : sizeof(T) * kVec));

// The longest row that is read once if a block has so many bytes of dynamic shared memory.
template <class T, int kVec>
constexpr int64_t columns_read_once(int64_t shared_memory) {
  return kVec * (kHeld<T, kVec> * kRowThreads +
                 shared_memory / static_cast<int64_t>(sizeof(AlignedVector<T, kVec>)));
}

constexpr int kInFlight = 4;  // vectors that a thread loads at once for shared memory

// Vector k of every row belongs to the same thread, so that no other thread reads or writes its part of
// shared memory or of dcolumn_scale, and no barrier is needed for them.
//
// Args:
//   in_shared: vectors of a row in shared memory.
//   dcolumn_scale_at: offset in bytes of the sums of dcolumn_scale in shared memory; negative if they are in
//     global memory.
//   dcolumn_scale_of_block: [blocks, columns], sums over the rows of each block.
//   loss_of_block: [blocks].
template <class T, int kVec, bool kScaled>
__global__ void __launch_bounds__(kRowThreads)
    entropy_long_rows(const EntropyProblem<T> a, int64_t in_shared, int64_t dcolumn_scale_at,
                      at::opmath_type<T>* __restrict__ dcolumn_scale_of_block,
                      double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  using Vector = AlignedVector<T, kVec>;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ RowScratch<Math> scratch;
  __shared__ double loss_scratch[32];
  static_assert(sizeof(scratch) + sizeof(loss_scratch) <= kStaticShared);
  constexpr int threads = kRowThreads, first = kHeld<T, kVec> * threads;  // first vector not in registers
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t vectors = a.columns / kVec;
  const int in_registers = vectors < first ? static_cast<int>(vectors) : first;
  Vector* shared = reinterpret_cast<Vector*>(dynamic_shared);

  Math* const dcolumn_scale_out =
      kScaled ? dcolumn_scale_of_block + static_cast<int64_t>(blockIdx.x) * a.columns : nullptr;
  Math* const dcolumn_scale =
      kScaled && dcolumn_scale_at >= 0
          ? reinterpret_cast<Math*>(reinterpret_cast<char*>(dynamic_shared) + dcolumn_scale_at)
          : dcolumn_scale_out;
  double invalid = 0;  // NaN if a column scale is invalid
  if constexpr (kScaled) {
    for (int64_t k = thread; k < vectors; k += threads) {
      Math column_scale[kVec], sum[kVec];
      load_values(a.column_scale + k * kVec, true, column_scale);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        invalid += nan_if_invalid_scale(column_scale[v]);
        sum[v] = 0;
      }
      store_values(dcolumn_scale + k * kVec, sum);
    }
  }

  double z = 0, t = 0;
  const auto count = [&](const Vector& y, int64_t k) {
    Math column_scale[kVec], some_z = 0, some_t = 0;
    if (kScaled) load_values(a.column_scale + k * kVec, true, column_scale);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Math s =
          counted_score(score_of(static_cast<Math>(y.get(v)), kScaled ? column_scale[v] : Math(1)));
      some_z += s;
      some_t += s * log_or_none(s);
    }
    z += some_z;
    t += some_t;
  };
  const auto write = [&](const Vector& y, int64_t k, int64_t row, const EntropyGroup<Math>& group) {
    Math column_scale[kVec], sum[kVec];
    if (kScaled) load_values(a.column_scale + k * kVec, true, column_scale);
    if (kScaled) load_values(dcolumn_scale + k * kVec, true, sum);
    Vector out;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Math w = static_cast<Math>(y.get(v)), part = kScaled ? w * column_scale[v] : w;
      const Math ds = entropy_slope(log_or_none(w * part), group);
      out.set(v, static_cast<T>(2 * part * ds));
      if (kScaled) sum[v] += w * (w * ds);
    }
    if (kScaled) store_values(dcolumn_scale + k * kVec, sum);
    store_aligned(a.dy + row * a.columns + k * kVec, out);
  };

  Vector held[kHeld<T, kVec>];
#pragma unroll
  for (int p = 0; p < kHeld<T, kVec>; ++p) {
    const int k = p * threads + thread;
    held[p] = load_aligned<T, kVec>(a.y + blockIdx.x * a.columns + k * kVec, k < in_registers);
  }
  EntropyTally tally;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* from = a.y + row * a.columns;
    z = t = 0;
#pragma unroll
    for (int p = 0; p < kHeld<T, kVec>; ++p) {
      const int k = p * threads + thread;
      if (k >= in_registers) break;
      count(held[p], k);
    }
    for (int64_t start = first + thread; start < vectors; start += kInFlight * threads) {
      Vector y[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t k = start + i * threads;
        y[i] = load_aligned<T, kVec>(from + k * kVec, k < vectors);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t k = start + i * threads;
        if (k >= vectors) break;
        if (k - first < in_shared) shared[k - first] = y[i];
        count(y[i], k);
      }
    }
    const EntropyGroup<Math> group = close_row(z, t, a.scale, scratch, tally);
#pragma unroll
    for (int p = 0; p < kHeld<T, kVec>; ++p) {
      const int k = p * threads + thread;
      if (k >= in_registers) break;
      write(held[p], k, row, group);
      // loads of the next row overlap with the stores of the rest of this row
      held[p] = load_aligned<T, kVec>(from + gridDim.x * a.columns + k * kVec, row + gridDim.x < a.rows);
    }
    for (int64_t k = first + thread; k < vectors; k += threads) {
      const Vector y =
          k - first < in_shared ? shared[k - first] : load_aligned<T, kVec>(from + k * kVec, true);
      write(y, k, row, group);
    }
  }

  const double loss = block_sum(tally.total() + invalid, loss_scratch);
  if (threadIdx.x == 0) loss_of_block[blockIdx.x] = loss;
  if (kScaled && dcolumn_scale != dcolumn_scale_out) {
    for (int64_t k = thread; k < vectors; k += threads) {
      Math sum[kVec];
      load_values(dcolumn_scale + k * kVec, true, sum);
      store_values(dcolumn_scale_out + k * kVec, sum);
    }
  }
}

template <class T, int kVec, bool kScaled, class LauncherT>
void launch_entropy_long_rows(LauncherT& launcher, const EntropyProblem<T>& a) {
  using Math = at::opmath_type<T>;
  constexpr int64_t kBytes = sizeof(AlignedVector<T, kVec>);
  const int64_t blocks = std::min<int64_t>(a.rows, launcher.multiprocessors());
  const int64_t columns = std::min(a.columns, columns_read_once<T, kVec>(launcher.shared_memory()));
  const int64_t in_shared = std::max<int64_t>(columns / kVec - kHeld<T, kVec> * kRowThreads, 0);
  int64_t bytes = (in_shared * kBytes + 15) / 16 * 16, dcolumn_scale_at = -1;
  const int64_t dcolumn_scale_bytes = kScaled ? a.columns * static_cast<int64_t>(sizeof(Math)) : 0;
  if (kScaled && bytes + dcolumn_scale_bytes <= launcher.shared_memory()) {
    dcolumn_scale_at = bytes;
    bytes += dcolumn_scale_bytes;
  }
  Math* dcolumn_scale = kScaled ? launcher.template allocate<Math>(blocks * a.columns) : nullptr;
  double* loss = launcher.template allocate<double>(blocks);
  launcher.launch(entropy_long_rows<T, kVec, kScaled>, dim3(blocks), dim3(kRowThreads), bytes, a, in_shared,
                  dcolumn_scale_at, dcolumn_scale, loss);
  if (kScaled) {
    launch_sum_columns(launcher, static_cast<const Math*>(dcolumn_scale), blocks, a.columns, a.dcolumn_scale);
  }
  launch_sum_losses(launcher, static_cast<const double*>(loss), blocks, a.scale, a.loss);
}

}  // namespace drot
