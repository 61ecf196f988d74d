// The kernel of sparsegpt_sweep and its launch: SparseGPT's loop over the columns of one block, many rows at
// a time. tests/native compiles this file for a CPU too.
#pragma once

#include <cstdint>

#include "common/selection_math.h"
#include "ops/sparsegpt_sweep_math.h"

namespace drot {

constexpr int kSweepColumns = 128;             // the most that a launch sweeps
constexpr int kSweepOwn = kSweepColumns / 32;  // columns of a lane: lane, lane + 32, …
constexpr int kSweepWarps = 8;
constexpr int kSweepRows = 4;  // rows of a warp; several rows hide the latency of each column's step
constexpr int kSweepBlockRows = kSweepWarps * kSweepRows;
constexpr unsigned kAllLanes = 0xffffffffu;

// The most columns that a launch sweeps in type T: Hinv of these columns takes 64 KB (fp64: 72 KB) of shared
// memory, which every GPU since sm_80 has.
template <class T>
constexpr int kSweepWidest = sizeof(T) == 4 ? kSweepColumns : 96;

template <class T>
struct SweepProblem {
  const T* w;  // [rows, columns]
  int64_t w_stride;
  const T* hinv;  // [columns, columns], Hinv: the upper Cholesky factor of the inverse Hessian
  int64_t hinv_stride;
  const bool* given;  // a given mask, strided as the outputs; null: remove `prune` of each `group`
  T* w_out;           // [rows, columns], as err and removed
  T* err;
  bool* removed;
  int64_t out_stride;
  int64_t rows;
  int columns, prune, group;
  // a batch of such problems, and how far their matrices lie apart
  int batch = 1;
  int64_t w_step = 0, hinv_step = 0, out_step = 0;

  __device__ SweepProblem of_batch(int64_t index) const {
    SweepProblem one = *this;
    one.w += index * w_step;
    one.hinv += index * hinv_step;
    if (given != nullptr) one.given += index * out_step;
    one.w_out += index * out_step;
    one.err += index * out_step;
    one.removed += index * out_step;
    return one;
  }
};

// own[index], by a chain of selections: a register array that is indexed at run time would be moved to
// memory.
template <class V>
__device__ V pick(const V (&own)[kSweepOwn], int index) {
  V value = own[0];
#pragma unroll
  for (int q = 1; q < kSweepOwn; ++q) value = index == q ? own[q] : value;
  return value;
}

// The mask of the group that starts at column `start`, bit q for column lane + 32 q, from the weights as
// updated so far. Every lane computes the rank of its own columns in the group.
//
// Args:
//   w, diagonal: weights of a row, and the diagonal of Hinv, in the columns of the lane.
//   lane: index of the lane.
//   start: first column of the group.
//   group: columns of the group.
//   prune: columns to remove.
template <class T>
__device__ uint32_t choose_group(const T (&w)[kSweepOwn], const T (&diagonal)[kSweepOwn], int lane, int start,
                                 int group, int prune) {
  OrderedKey<T> key[kSweepOwn];
  int rank[kSweepOwn];
#pragma unroll
  for (int q = 0; q < kSweepOwn; ++q) {
    key[q] = ordered_key(sweep_score(w[q], diagonal[q]));
    rank[q] = 0;
  }
  for (int other = start; other < start + group; ++other) {
    const OrderedKey<T> theirs = __shfl_sync(kAllLanes, pick(key, other / 32), other % 32);
#pragma unroll
    for (int q = 0; q < kSweepOwn; ++q) {
      const int column = lane + 32 * q;
      rank[q] += other < column   ? goes_before(theirs, key[q])
                 : other > column ? !goes_before(key[q], theirs)
                                  : 0;
    }
  }
  uint32_t bits = 0;
#pragma unroll
  for (int q = 0; q < kSweepOwn; ++q) {
    const int column = lane + 32 * q;
    const bool member = column >= start && column < start + group;
    bits |= static_cast<uint32_t>(member && rank[q] < prune) << q;
  }
  return bits;
}

// Hinv is in shared memory; a warp holds kSweepRows rows in registers and walks over the columns. After the
// first barrier no shared memory is written, and no row is shared by two warps.
template <class T>
__global__ void __launch_bounds__(kSweepWarps * 32) sweep_rows(const SweepProblem<T> all) {
  const SweepProblem<T> p = all.of_batch(blockIdx.y);
  extern __shared__ uint4 dynamic_shared[];
  T* hinv = reinterpret_cast<T*>(dynamic_shared);  // [columns, columns]; only the upper triangle is set
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
  for (int row = warp; row < p.columns; row += kSweepWarps) {
#pragma unroll
    for (int q = 0; q < kSweepOwn; ++q) {
      const int column = lane + 32 * q;
      if (column >= row && column < p.columns) {
        hinv[row * p.columns + column] = p.hinv[row * p.hinv_stride + column];
      }
    }
  }
  __syncthreads();

  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSweepBlockRows + warp * kSweepRows;
  T w[kSweepRows][kSweepOwn], diagonal[kSweepOwn];
  uint32_t bits[kSweepRows];
#pragma unroll
  for (int q = 0; q < kSweepOwn; ++q) {
    const int column = lane + 32 * q;
    const bool inside = column < p.columns;
    diagonal[q] = inside ? hinv[column * p.columns + column] : T(1);
#pragma unroll
    for (int r = 0; r < kSweepRows; ++r) {
      const bool exists = inside && first + r < p.rows;
      if (q == 0) bits[r] = 0;
      w[r][q] = exists ? p.w[(first + r) * p.w_stride + column] : T(0);
      if (p.given && exists) {
        bits[r] |= static_cast<uint32_t>(p.given[(first + r) * p.out_stride + column]) << q;
      }
    }
  }

  int next_group = p.given ? p.columns : 0;
#pragma unroll
  for (int q = 0; q < kSweepOwn; ++q) {
    const int end = min(32, p.columns - 32 * q);  // ≤ 0 where the block is narrower
    for (int owner = 0; owner < end; ++owner) {
      const int j = 32 * q + owner;
      if (j == next_group) {
#pragma unroll
        for (int r = 0; r < kSweepRows; ++r) {
          bits[r] |= choose_group(w[r], diagonal, lane, j, p.group, p.prune);
        }
        next_group += p.group;
      }
      T error[kSweepRows];
#pragma unroll
      for (int r = 0; r < kSweepRows; ++r) {
        T mine;
        sweep_error(mine, w[r][q], diagonal[q], (bits[r] >> q & 1u) != 0);
        error[r] = __shfl_sync(kAllLanes, mine, owner);
      }
      // registers before q hold columns left of column j
#pragma unroll
      for (int k = q; k < kSweepOwn; ++k) {
        const int column = lane + 32 * k;
        if (column > j && column < p.columns) {
          const T u = hinv[j * p.columns + column];
#pragma unroll
          for (int r = 0; r < kSweepRows; ++r) sweep_update(w[r][k], error[r], u);
        }
      }
    }
  }

#pragma unroll
  for (int q = 0; q < kSweepOwn; ++q) {
    const int column = lane + 32 * q;
    if (column >= p.columns) continue;
#pragma unroll
    for (int r = 0; r < kSweepRows; ++r) {
      if (first + r >= p.rows) continue;
      const int64_t at = (first + r) * p.out_stride + column;
      const bool gone = bits[r] >> q & 1u;
      // a weight does not change after its own column's step, so this is the error of that step
      sweep_error(p.err[at], w[r][q], diagonal[q], gone);
      p.w_out[at] = gone ? T(0) : w[r][q];
      p.removed[at] = gone;
    }
  }
}

// launcher: a Launcher (common/cuda/launcher.cuh). p.rows and p.columns are at least 1.
template <class T, class LauncherT>
void run_sweep(LauncherT& launcher, const SweepProblem<T>& p) {
  const int64_t blocks = (p.rows + kSweepBlockRows - 1) / kSweepBlockRows;
  const int64_t hinv_bytes = int64_t{sizeof(T)} * p.columns * p.columns;
  launcher.launch(sweep_rows<T>, dim3(static_cast<unsigned>(blocks), p.batch), dim3(kSweepWarps * 32),
                  hinv_bytes, p);
}

}  // namespace drot
