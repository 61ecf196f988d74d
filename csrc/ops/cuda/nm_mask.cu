// nm_mask on the GPU: the op. Its kernels are in nm_mask_{groups,rows}.cuh; wider rows are sorted.
#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/launcher.cuh"
#include "ops/cuda/nm_mask_groups.cuh"
#include "ops/cuda/nm_mask_rows.cuh"
#include "ops/nm_mask.h"

namespace drot {
namespace {

// For rows too wide for one block, usually a whole matrix seen as one row: a stable sort by the whole GPU.
// Adding 0 turns -0 into 0.
at::Tensor mask_by_sorting(const at::Tensor& score, int64_t prune) {
  // `true` alone would be the dimension of another overload
  const std::optional<bool> stable = true;
  const at::Tensor order = std::get<1>(at::sort(at::add(score, 0), stable, /*dim=*/-1, /*descending=*/false));
  return at::zeros(score.sizes(), score.options().dtype(at::kBool))
      .scatter_(-1, order.narrow(-1, 0, prune), true);
}

at::Tensor nm_mask_cuda(const at::Tensor& score, int64_t prune, int64_t group) {
  check_nm_mask(score, prune, group);
  const c10::cuda::CUDAGuard guard(score.device());
  if (group == 0 && score.size(1) > kWidestMaskRow) return mask_by_sorting(score, prune);
  const at::Tensor in = score.contiguous();
  at::Tensor out = at::empty(score.sizes(), score.options().dtype(at::kBool));
  if (prune == 0 || score.numel() == 0) return out.zero_();
  bool* removed = out.mutable_data_ptr<bool>();
  Launcher launcher(in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, score.scalar_type(), "nm_mask", [&] {
    const scalar_t* p = in.const_data_ptr<scalar_t>();
    if (group == 0) {
      TORCH_CHECK_VALUE(score.size(0) <= INT32_MAX, "score must have at most 2^31 - 1 rows, got ",
                        score.size(0));
      return run_mask_rows(launcher, p, score.size(0), static_cast<int>(score.size(1)),
                           static_cast<int>(prune), removed);
    }
    run_mask_groups(launcher, p, score.numel() / group, static_cast<int>(group), static_cast<int>(prune),
                    removed);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("nm_mask", &nm_mask_cuda); }

}  // namespace drot
