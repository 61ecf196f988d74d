// entropy_loss of rows that are too long for entropy_loss_rows.cuh, or not aligned. A block holds one row:
// the first part in registers, the next in shared memory; only what fits in neither is read again. dy is
// written once.
//
// With the shared memory of sm_80 (sm_90) y is read once up to these numbers of columns:
//   fp16, bf16  132,096 (164,864); not aligned 107,520 (140,288)
//   fp32         66,048  (82,432)
//   fp64         33,024  (41,216); of a row of 65,536 the rest is read twice
//
// With a factor, the sums of dm lie in shared memory where the row leaves room: fp16 and bf16 up to 41,472
// (54,952) columns, fp32 33,024 (41,216), fp64 16,512 (20,608). In longer rows they lie in global memory,
// where the cache may hold them, and every row reads and writes them: 8 bytes a weight, fp64 16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/entropy_loss_rows.cuh"

namespace drot {

// Packs that a thread holds in registers: 48 of its 128.
template <class T, int kVec>
constexpr int kHeld = static_cast<int>(48 * 4 / (sizeof(T) * kVec < 4 ? 4 : sizeof(T) * kVec));

// The longest row that is read once, on a GPU that gives a block so many bytes of dynamic shared memory.
template <class T, int kVec>
constexpr int64_t columns_read_once(int64_t shared_memory) {
  return kVec * (kHeld<T, kVec> * kRowThreads + shared_memory / static_cast<int64_t>(sizeof(Pack<T, kVec>)));
}

constexpr int kArriving = 4;  // packs of a thread that are on their way to shared memory together

// Pack k of a row is always with the same thread, which alone reads and writes what belongs to it.
// in_shared: packs in shared memory. dm_at: where in shared memory dm is, in bytes; negative where it is not.
template <class T, int kVec, bool kFactor>
__global__ void __launch_bounds__(kRowThreads)
    entropy_long_rows(const EntropyProblem<T> a, int64_t in_shared, int64_t dm_at,
                      at::opmath_type<T>* __restrict__ dm_of_block, double* __restrict__ loss_of_block) {
  using Math = at::opmath_type<T>;
  using Packed = Pack<T, kVec>;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ RowScratch<Math> scratch;
  __shared__ double loss_scratch[32];
  constexpr int threads = kRowThreads, first = kHeld<T, kVec> * threads;  // pack that registers do not hold
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t packs = a.columns / kVec;
  const int in_registers = packs < first ? static_cast<int>(packs) : first;
  Packed* shared = reinterpret_cast<Packed*>(dynamic_shared);

  Math* const dm_out = kFactor ? dm_of_block + static_cast<int64_t>(blockIdx.x) * a.columns : nullptr;
  Math* const dm = kFactor && dm_at >= 0
                       ? reinterpret_cast<Math*>(reinterpret_cast<char*>(dynamic_shared) + dm_at)
                       : dm_out;
  double report = 0;
  if constexpr (kFactor) {
    for (int64_t k = thread; k < packs; k += threads) {
      Math m[kVec], sum[kVec];
      load_values(a.m + k * kVec, true, m);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        report += report_factor(m[v]);
        sum[v] = 0;
      }
      store_values(dm + k * kVec, sum);
    }
  }

  double z = 0, t = 0;
  const auto count = [&](const Packed& y, int64_t k) {
    Math m[kVec], some_z = 0, some_t = 0;
    if (kFactor) load_values(a.m + k * kVec, true, m);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Math s = counted_score(score_of(static_cast<Math>(y.get(v)), kFactor ? m[v] : Math(1)));
      some_z += s;
      some_t += s * log_or_none(s);
    }
    z += some_z;
    t += some_t;
  };
  const auto write = [&](const Packed& y, int64_t k, int64_t row, const EntropyGroup<Math>& group) {
    Math m[kVec], sum[kVec];
    if (kFactor) load_values(a.m + k * kVec, true, m);
    if (kFactor) load_values(dm + k * kVec, true, sum);
    Packed out;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Math w = static_cast<Math>(y.get(v)), part = kFactor ? w * m[v] : w;
      const Math ds = entropy_slope(log_or_none(w * part), group);
      out.set(v, static_cast<T>(2 * part * ds));
      if (kFactor) sum[v] += w * (w * ds);
    }
    if (kFactor) store_values(dm + k * kVec, sum);
    *reinterpret_cast<Packed*>(a.dy + row * a.columns + k * kVec) = out;
  };

  Packed held[kHeld<T, kVec>];
#pragma unroll
  for (int p = 0; p < kHeld<T, kVec>; ++p) {
    const int k = p * threads + thread;
    held[p] = load_pack<T, kVec>(a.y + blockIdx.x * a.columns + k * kVec, k < in_registers);
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
    for (int64_t start = first + thread; start < packs; start += kArriving * threads) {
      Packed y[kArriving];
#pragma unroll
      for (int i = 0; i < kArriving; ++i) {
        const int64_t k = start + i * threads;
        y[i] = load_pack<T, kVec>(from + k * kVec, k < packs);
      }
#pragma unroll
      for (int i = 0; i < kArriving; ++i) {
        const int64_t k = start + i * threads;
        if (k >= packs) break;
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
      // what will be held of the next row is on its way while the rest of this one is written
      held[p] = load_pack<T, kVec>(from + gridDim.x * a.columns + k * kVec, row + gridDim.x < a.rows);
    }
    for (int64_t k = first + thread; k < packs; k += threads) {
      const Packed y = k - first < in_shared ? shared[k - first] : load_pack<T, kVec>(from + k * kVec, true);
      write(y, k, row, group);
    }
  }

  const double loss = block_sum(tally.total() + report, loss_scratch);
  if (threadIdx.x == 0) loss_of_block[blockIdx.x] = loss;
  if (kFactor && dm != dm_out) {
    for (int64_t k = thread; k < packs; k += threads) {
      Math sum[kVec];
      load_values(dm + k * kVec, true, sum);
      store_values(dm_out + k * kVec, sum);
    }
  }
}

template <class T, int kVec, bool kFactor, class Gpu>
void launch_entropy_long_rows(Gpu& gpu, const EntropyProblem<T>& a) {
  using Math = at::opmath_type<T>;
  constexpr int64_t kBytes = sizeof(Pack<T, kVec>);
  const int64_t blocks = std::min<int64_t>(a.rows, gpu.processors());
  const int64_t columns = std::min(a.columns, columns_read_once<T, kVec>(gpu.shared_memory()));
  const int64_t in_shared = std::max<int64_t>(columns / kVec - kHeld<T, kVec> * kRowThreads, 0);
  int64_t bytes = (in_shared * kBytes + 15) / 16 * 16, dm_at = -1;
  const int64_t dm_bytes = kFactor ? a.columns * static_cast<int64_t>(sizeof(Math)) : 0;
  if (kFactor && bytes + dm_bytes <= gpu.shared_memory()) {
    dm_at = bytes;
    bytes += dm_bytes;
  }
  Math* dm = kFactor ? gpu.template room<Math>(blocks * a.columns) : nullptr;
  double* loss = gpu.template room<double>(blocks);
  gpu.launch(entropy_long_rows<T, kVec, kFactor>, dim3(blocks), dim3(kRowThreads), bytes, a, in_shared, dm_at,
             dm, loss);
  if (kFactor) launch_sum_columns(gpu, static_cast<const Math*>(dm), blocks, a.columns, a.dm);
  launch_sum_losses(gpu, static_cast<const double*>(loss), blocks, a.scale, a.loss);
}

}  // namespace drot
