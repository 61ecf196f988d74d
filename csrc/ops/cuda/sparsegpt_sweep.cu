#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/sparsegpt_sweep.h"
#include "ops/sparsegpt_sweep_math.h"

namespace drot {
namespace {

constexpr int kColumns = 128;        // that one kernel can sweep
constexpr int kOwn = kColumns / 32;  // columns of a lane: lane, lane + 32, …
constexpr int kWarps = 8;
constexpr int kRows = 4;  // of a warp, to hide the latency of each column's step
constexpr int kBlockRows = kWarps * kRows;
constexpr unsigned kAllLanes = 0xffffffffu;

// Columns that one kernel does sweep: their factor takes 64 or 72 KB of shared memory, which every GPU
// since sm_80 has.
template <class T>
constexpr int kWidest = sizeof(T) == 4 ? kColumns : 96;

template <class T>
struct Sweep {
  const T* w;
  int64_t w_stride;
  const T* hinv;  // [columns, columns]
  int64_t hinv_stride;
  const bool* given;  // mask, laid out as the outputs, or null where n:m is chosen
  T* w_out;
  T* err;
  bool* removed;
  int64_t out_stride;
  int64_t rows;
  int columns, prune, group;
};

// The element at `index` of a lane's values: a chain of selections, because a register array that
// is indexed at run time would live in memory.
template <class V>
__device__ V pick(const V (&own)[kOwn], int index) {
  V value = own[0];
#pragma unroll
  for (int q = 1; q < kOwn; ++q) value = index == q ? own[q] : value;
  return value;
}

// The mask bits (bit q: column lane + 32 q) of the group that starts at column `start`, from the
// weights as updated so far: every lane ranks its own members of the group against all of them.
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

// The factor lies in shared memory; a warp holds kRows rows in registers and walks the columns.
// Nothing is written to shared memory after the first barrier, and a warp shares no row.
template <class T>
__global__ void __launch_bounds__(kWarps * 32) sweep_rows(const Sweep<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* factor = reinterpret_cast<T*>(memory);  // [columns, columns], of it the upper triangle
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
  for (int row = warp; row < p.columns; row += kWarps) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int column = lane + 32 * q;
      if (column >= row && column < p.columns) {
        factor[row * p.columns + column] = p.hinv[row * p.hinv_stride + column];
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
    diagonal[q] = inside ? factor[column * p.columns + column] : T(1);
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
      // Columns up to 32 q + 31 lie left of column j in every lane's earlier registers.
#pragma unroll
      for (int k = q; k < kOwn; ++k) {
        const int column = lane + 32 * k;
        if (column > j && column < p.columns) {
          const T u = factor[j * p.columns + column];
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
      // A weight changes no more once its own column is passed, so this is the error it left.
      sweep_error(p.err[at], w[r][q], diagonal[q], gone);
      p.w_out[at] = gone ? T(0) : w[r][q];
      p.removed[at] = gone;
    }
  }
}

template <class T>
void launch(const Sweep<T>& p) {
  constexpr int kSize = sizeof(T);
  // The same number at every launch, so that threads that launch other widths do not disturb this one.
  C10_CUDA_CHECK(cudaFuncSetAttribute(sweep_rows<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kWidest<T> * kWidest<T> * kSize));
  const int bytes = p.columns * p.columns * kSize;
  const int64_t blocks = (p.rows + kBlockRows - 1) / kBlockRows;
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, "w has too many rows for one launch: ", p.rows);
  sweep_rows<T><<<static_cast<unsigned>(blocks), kWarps * 32, bytes, at::cuda::getCurrentCUDAStream()>>>(p);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sparsegpt_sweep_cuda(const at::Tensor& w,
                                                                    const at::Tensor& hinv,
                                                                    const std::optional<at::Tensor>& removed,
                                                                    int64_t prune, int64_t group) {
  check_sparsegpt_sweep(w, hinv, removed, prune, group);
  const c10::cuda::CUDAGuard guard(w.device());
  const int64_t rows = w.size(0), columns = w.size(1);
  // A block wider than the kernel's is swept in parts, whole groups each, with the update of what
  // lies to the right in between.
  const int64_t widest = w.scalar_type() == at::kFloat ? kWidest<float> : kWidest<double>;
  const int64_t width = removed ? widest : widest / group * group;
  at::Tensor work = columns > width    ? w.clone(at::MemoryFormat::Contiguous)
                    : w.stride(1) == 1 ? w
                                       : w.contiguous();
  const at::Tensor factor = hinv.stride(1) == 1 ? hinv : hinv.contiguous();
  const at::Tensor given = removed ? removed->contiguous() : at::Tensor();
  at::Tensor w_out = at::empty(w.sizes(), w.options());
  at::Tensor err = at::empty(w.sizes(), w.options());
  at::Tensor mask = at::empty(w.sizes(), w.options().dtype(at::kBool));
  if (w.numel() == 0) return {w_out, err, mask};
  for (int64_t start = 0; start < columns; start += width) {
    const int64_t stop = std::min(start + width, columns);
    AT_DISPATCH_FLOATING_TYPES(w.scalar_type(), "sparsegpt_sweep", [&] {
      launch<scalar_t>({work.const_data_ptr<scalar_t>() + start, work.stride(0),
                        factor.const_data_ptr<scalar_t>() + start * factor.stride(0) + start,
                        factor.stride(0), removed ? given.const_data_ptr<bool>() + start : nullptr,
                        w_out.mutable_data_ptr<scalar_t>() + start, err.mutable_data_ptr<scalar_t>() + start,
                        mask.mutable_data_ptr<bool>() + start, columns, rows, static_cast<int>(stop - start),
                        static_cast<int>(prune), static_cast<int>(group)});
    });
    if (stop < columns) {
      at::Tensor rest = work.narrow(1, stop, columns - stop);
      rest.addmm_(err.narrow(1, start, stop - start),
                  factor.narrow(0, start, stop - start).narrow(1, stop, columns - stop), 1, -1);
    }
  }
  return {w_out, err, mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("sparsegpt_sweep", &sparsegpt_sweep_cuda); }

}  // namespace drot
