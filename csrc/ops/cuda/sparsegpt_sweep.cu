// sparsegpt_sweep on the GPU: the op. Its kernel is in sparsegpt_sweep_rows.cuh.
#include <ATen/Dispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/sparsegpt_sweep_rows.cuh"
#include "ops/sparsegpt_sweep.h"

namespace drot {
namespace {

constexpr int64_t kMostBatch = 65535;  // blocks in the second dimension of a grid

std::tuple<at::Tensor, at::Tensor, at::Tensor> sparsegpt_sweep_cuda(const at::Tensor& w,
                                                                    const at::Tensor& hinv,
                                                                    const std::optional<at::Tensor>& removed,
                                                                    int64_t prune, int64_t group) {
  check_sparsegpt_sweep(w, hinv, removed, prune, group);
  const c10::cuda::CUDAGuard guard(w.device());
  const int64_t rows = w.size(-2), columns = w.size(-1), batch = w.dim() == 3 ? w.size(0) : 1;
  // A block wider than kWidest is swept in parts of whole groups. After each part the columns to the right
  // are updated: w_right -= err · Hinv[part, right].
  const int64_t widest = w.scalar_type() == at::kFloat ? kSweepWidest<float> : kSweepWidest<double>;
  const int64_t width = removed ? widest : widest / group * group;
  at::Tensor work = columns > width     ? w.clone(at::MemoryFormat::Contiguous)
                    : w.stride(-1) == 1 ? w
                                        : w.contiguous();
  const at::Tensor hinv_in = hinv.stride(-1) == 1 ? hinv : hinv.contiguous();
  const at::Tensor given = removed ? removed->contiguous() : at::Tensor();
  at::Tensor w_out = at::empty(w.sizes(), w.options());
  at::Tensor err = at::empty(w.sizes(), w.options());
  at::Tensor mask = at::empty(w.sizes(), w.options().dtype(at::kBool));
  if (w.numel() == 0) return {w_out, err, mask};
  TORCH_CHECK_VALUE(rows <= INT32_MAX * int64_t{kSweepBlockRows}, "w must have at most ",
                    INT32_MAX * int64_t{kSweepBlockRows}, " rows, got ", rows);
  TORCH_CHECK_VALUE(batch <= kMostBatch, "w must have at most ", kMostBatch, " matrices, got ", batch);
  Launcher launcher(w);
  for (int64_t start = 0; start < columns; start += width) {
    const int64_t stop = std::min(start + width, columns);
    AT_DISPATCH_FLOATING_TYPES(w.scalar_type(), "sparsegpt_sweep", [&] {
      run_sweep<scalar_t>(launcher,
                          {.w = work.const_data_ptr<scalar_t>() + start,
                           .w_stride = work.stride(-2),
                           .hinv = hinv_in.const_data_ptr<scalar_t>() + start * hinv_in.stride(-2) + start,
                           .hinv_stride = hinv_in.stride(-2),
                           .given = removed ? given.const_data_ptr<bool>() + start : nullptr,
                           .w_out = w_out.mutable_data_ptr<scalar_t>() + start,
                           .err = err.mutable_data_ptr<scalar_t>() + start,
                           .removed = mask.mutable_data_ptr<bool>() + start,
                           .out_stride = columns,
                           .rows = rows,
                           .columns = static_cast<int>(stop - start),
                           .prune = static_cast<int>(prune),
                           .group = static_cast<int>(group),
                           .batch = static_cast<int>(batch),
                           .w_step = batch > 1 ? work.stride(0) : 0,
                           .hinv_step = batch > 1 ? hinv_in.stride(0) : 0,
                           .out_step = rows * columns});
    });
    if (stop < columns) {
      at::Tensor right = work.narrow(-1, stop, columns - stop);
      const at::Tensor error = err.narrow(-1, start, stop - start);
      const at::Tensor factor = hinv_in.narrow(-2, start, stop - start).narrow(-1, stop, columns - stop);
      if (w.dim() == 3) {
        right.baddbmm_(error, factor, /*beta=*/1, /*alpha=*/-1);
      } else {
        right.addmm_(error, factor, /*beta=*/1, /*alpha=*/-1);
      }
    }
  }
  return {w_out, err, mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("sparsegpt_sweep", &sparsegpt_sweep_cuda); }

}  // namespace drot
