#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "ops/cuda/pruned_importance_groups.cuh"
#include "ops/pruned_importance.h"

namespace drot {
namespace {

constexpr int64_t kBlocks = 1024;  // wanted; more partial sums of dm would cost more than they bring

template <class T, int kGroup>
bool launch_group(const PrunedProblem<T>& a, dim3 grid) {
  const size_t bytes = std::min<size_t>(kGroup * sizeof(T), 16);
  if (a.group != kGroup || !aligned_to(a.y, bytes) || !aligned_to(a.dy, bytes)) return false;
  pruned_groups<T, kGroup><<<grid, kGroupThreads, 0, at::cuda::getCurrentCUDAStream()>>>(a);
  return true;
}

template <class T>
void launch(const PrunedProblem<T>& a, dim3 grid) {
  const bool held = launch_group<T, 1>(a, grid) || launch_group<T, 2>(a, grid) ||
                    launch_group<T, 4>(a, grid) || launch_group<T, 8>(a, grid);
  if (!held) pruned_any_groups<T><<<grid, kGroupThreads, 0, at::cuda::getCurrentCUDAStream()>>>(a);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The mask of whole rows comes from nm_mask, which needs the scores in memory.
at::Tensor row_mask(const at::Tensor& y, const std::optional<at::Tensor>& m, at::ScalarType wide,
                    int64_t prune) {
  static const auto nm_mask = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("drot::nm_mask", "")
                                  .typed<at::Tensor(const at::Tensor&, int64_t, int64_t)>();
  const at::Tensor w = y.to(wide);
  return nm_mask.call(at::mul(w, m.has_value() ? at::mul(w, *m) : w), prune, 0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pruned_importance_cuda(const at::Tensor& y,
                                                                      const std::optional<at::Tensor>& m,
                                                                      int64_t prune, int64_t group,
                                                                      double scale) {
  check_pruned_importance(y, m, prune, group, scale);
  const c10::cuda::CUDAGuard guard(y.device());
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const int64_t rows = y.size(0), columns = y.size(1);
  const at::Tensor in = y.contiguous(), factor = m.has_value() ? m->contiguous() : at::Tensor();
  at::Tensor dy = at::empty(in.sizes(), in.options());
  at::Tensor dm = at::zeros({m.has_value() ? columns : 0}, wide), loss = at::zeros({}, wide);
  if (y.numel() == 0) return {loss, dy, dm};
  const at::Tensor removed = group == 0 ? row_mask(in, m, wide.dtype().toScalarType(), prune) : at::Tensor();

  const int64_t size = std::max<int64_t>(group, 1);
  const int64_t tiles = (columns / size + kGroupThreads - 1) / kGroupThreads;
  const int64_t wanted = std::min<int64_t>({(rows + 7) / 8, std::max<int64_t>(kBlocks / tiles, 1), 65535});
  const int64_t chunk = (rows + wanted - 1) / wanted, chunks = (rows + chunk - 1) / chunk;
  TORCH_CHECK_VALUE(tiles <= INT32_MAX, "y is too wide: ", columns, " columns");
  at::Tensor partial = at::empty({m.has_value() ? chunks * columns : 0}, wide);
  at::Tensor losses = at::empty({chunks * tiles}, wide.dtype(at::kDouble));
  const auto stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "pruned_importance", [&] {
    using Math = at::opmath_type<scalar_t>;
    PrunedProblem<scalar_t> a{in.const_data_ptr<scalar_t>(),
                              m.has_value() ? factor.const_data_ptr<Math>() : nullptr,
                              removed.defined() ? removed.const_data_ptr<bool>() : nullptr,
                              rows,
                              columns,
                              chunk,
                              static_cast<int>(size),
                              static_cast<int>(prune),
                              static_cast<Math>(scale),
                              dy.mutable_data_ptr<scalar_t>(),
                              m.has_value() ? partial.mutable_data_ptr<Math>() : nullptr,
                              losses.mutable_data_ptr<double>()};
    launch(a, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(chunks)));
    if (m.has_value()) {
      sum_columns<Math>
          <<<static_cast<unsigned>((columns + kSumTile - 1) / kSumTile), dim3(kSumTile, kSumTile), 0,
             stream>>>(partial.const_data_ptr<Math>(), chunks, columns, dm.mutable_data_ptr<Math>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    sum_losses<Math><<<1, 1024, 0, stream>>>(losses.const_data_ptr<double>(), losses.numel(), scale,
                                             loss.mutable_data_ptr<Math>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {loss, dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("pruned_importance", &pruned_importance_cuda); }

}  // namespace drot
