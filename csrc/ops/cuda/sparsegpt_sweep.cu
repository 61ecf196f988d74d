// sparsegpt_sweep on the GPU: SparseGPT's loop over the columns of one block, many rows at a time.
#include <ATen/Dispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "common/cuda/launcher.cuh"
#include "ops/sparsegpt_sweep.h"
#include "ops/sparsegpt_sweep_math.h"

namespace drot {
namespace {

constexpr int kColumns = 128;        // the most that a launch sweeps
constexpr int kOwn = kColumns / 32;  // columns of a lane: lane, lane + 32, …
constexpr int kWarps = 8;
constexpr int kRows = 4;  // rows of a warp; several rows hide the latency of each column's step
constexpr int kBlockRows = kWarps * kRows;
constexpr unsigned kAllLanes = 0xffffffffu;

// The most columns that a launch sweeps in type T: Hinv of these columns takes 64 KB (fp64: 72 KB) of shared
// memory, which every GPU since sm_80 has.
template <class T>
constexpr int kWidest = sizeof(T) == 4 ? kColumns : 96;

template <class T>
struct Sweep {
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
};

// own[index], by a chain of selections: a register array that is indexed at run time would be moved to
// memory.
template <class V>
__device__ V pick(const V (&own)[kOwn], int index) {
  V value = own[0];
#pragma unroll
  for (int q = 1; q < kOwn; ++q) value = index == q ? own[q] : value;
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
__device__ uint32_t choose_group(const T (&w)[kOwn], const T (&diagonal)[kOwn], int lane, int start,
                                 int group, int prune) {
  OrderedKey<T> key[kOwn];
  int rank[kOwn];
#pragma unroll
  for (int q = 0; q < kOwn; ++q) {
    key[q] = ordered_key(sweep_score(w[q], diagonal[q]));
    rank[q] = 0;
  }
  for (int other = start; other < start + group; ++other) {
    const OrderedKey<T> theirs = __shfl_sync(kAllLanes, pick(key, other / 32), other % 32);
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int column = lane + 32 * q;
      rank[q] += other < column   ? goes_before(theirs, key[q])
                 : other > column ? !goes_before(key[q], theirs)
                                  : 0;
    }
  }
  uint32_t bits = 0;
#pragma unroll
  for (int q = 0; q < kOwn; ++q) {
    const int column = lane + 32 * q;
    const bool member = column >= start && column < start + group;
    bits |= static_cast<uint32_t>(member && rank[q] < prune) << q;
  }
  return bits;
}

// Hinv is in shared memory; a warp holds kRows rows in registers and walks over the columns. After the first
// barrier no shared memory is written, and no row is shared by two warps.
template <class T>
__global__ void __launch_bounds__(kWarps * 32) sweep_rows(const Sweep<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* hinv = reinterpret_cast<T*>(memory);  // [columns, columns]; only the upper triangle is set
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
  for (int row = warp; row < p.columns; row += kWarps) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int column = lane + 32 * q;
      if (column >= row && column < p.columns) {
        hinv[row * p.columns + column] = p.hinv[row * p.hinv_stride + column];
      }
    }
  }
  __syncthreads();

  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockRows + warp * kRows;
  T w[kRows][kOwn], diagonal[kOwn];
  uint32_t bits[kRows];
#pragma unroll
  for (int q = 0; q < kOwn; ++q) {
    const int column = lane + 32 * q;
    const bool inside = column < p.columns;
    diagonal[q] = inside ? hinv[column * p.columns + column] : T(1);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
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
  for (int q = 0; q < kOwn; ++q) {
    const int end = min(32, p.columns - 32 * q);  // ≤ 0 where the block is narrower
    for (int owner = 0; owner < end; ++owner) {
      const int j = 32 * q + owner;
      if (j == next_group) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          bits[r] |= choose_group(w[r], diagonal, lane, j, p.group, p.prune);
        }
        next_group += p.group;
      }
      T error[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        T mine;
        sweep_error(mine, w[r][q], diagonal[q], (bits[r] >> q & 1u) != 0);
        error[r] = __shfl_sync(kAllLanes, mine, owner);
      }
      // registers before q hold columns left of column j
#pragma unroll
      for (int k = q; k < kOwn; ++k) {
        const int column = lane + 32 * k;
        if (column > j && column < p.columns) {
          const T u = hinv[j * p.columns + column];
#pragma unroll
          for (int r = 0; r < kRows; ++r) sweep_update(w[r][k], error[r], u);
        }
      }
    }
  }

#pragma unroll
  for (int q = 0; q < kOwn; ++q) {
    const int column = lane + 32 * q;
    if (column >= p.columns) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
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

template <class T>
void launch_sweep(Launcher& launcher, const Sweep<T>& p) {
  const int64_t blocks = (p.rows + kBlockRows - 1) / kBlockRows;
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, "w must have at most ", int64_t{INT32_MAX} * kBlockRows,
                    " rows, got ", p.rows);
  const int64_t hinv_bytes = int64_t{sizeof(T)} * p.columns * p.columns;
  launcher.launch(sweep_rows<T>, dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32), hinv_bytes, p);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sparsegpt_sweep_cuda(const at::Tensor& w,
                                                                    const at::Tensor& hinv,
                                                                    const std::optional<at::Tensor>& removed,
                                                                    int64_t prune, int64_t group) {
  check_sparsegpt_sweep(w, hinv, removed, prune, group);
  const c10::cuda::CUDAGuard guard(w.device());
  const int64_t rows = w.size(0), columns = w.size(1);
  // A block wider than kWidest is swept in parts of whole groups. After each part the columns to the right
  // are updated: w_right -= err · Hinv[part, right].
  const int64_t widest = w.scalar_type() == at::kFloat ? kWidest<float> : kWidest<double>;
  const int64_t width = removed ? widest : widest / group * group;
  at::Tensor work = columns > width    ? w.clone(at::MemoryFormat::Contiguous)
                    : w.stride(1) == 1 ? w
                                       : w.contiguous();
  const at::Tensor hinv_in = hinv.stride(1) == 1 ? hinv : hinv.contiguous();
  const at::Tensor given = removed ? removed->contiguous() : at::Tensor();
  at::Tensor w_out = at::empty(w.sizes(), w.options());
  at::Tensor err = at::empty(w.sizes(), w.options());
  at::Tensor mask = at::empty(w.sizes(), w.options().dtype(at::kBool));
  if (w.numel() == 0) return {w_out, err, mask};
  Launcher launcher(w);
  for (int64_t start = 0; start < columns; start += width) {
    const int64_t stop = std::min(start + width, columns);
    AT_DISPATCH_FLOATING_TYPES(w.scalar_type(), "sparsegpt_sweep", [&] {
      launch_sweep<scalar_t>(launcher,
                             {.w = work.const_data_ptr<scalar_t>() + start,
                              .w_stride = work.stride(0),
                              .hinv = hinv_in.const_data_ptr<scalar_t>() + start * hinv_in.stride(0) + start,
                              .hinv_stride = hinv_in.stride(0),
                              .given = removed ? given.const_data_ptr<bool>() + start : nullptr,
                              .w_out = w_out.mutable_data_ptr<scalar_t>() + start,
                              .err = err.mutable_data_ptr<scalar_t>() + start,
                              .removed = mask.mutable_data_ptr<bool>() + start,
                              .out_stride = columns,
                              .rows = rows,
                              .columns = static_cast<int>(stop - start),
                              .prune = static_cast<int>(prune),
                              .group = static_cast<int>(group)});
    });
    if (stop < columns) {
      at::Tensor right = work.narrow(1, stop, columns - stop);
      right.addmm_(err.narrow(1, start, stop - start),
                   hinv_in.narrow(0, start, stop - start).narrow(1, stop, columns - stop), /*beta=*/1,
                   /*alpha=*/-1);
    }
  }
  return {w_out, err, mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("sparsegpt_sweep", &sparsegpt_sweep_cuda); }

}  // namespace drot
