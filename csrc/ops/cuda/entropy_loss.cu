#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "ops/cuda/entropy_loss_passes.cuh"
#include "ops/cuda/entropy_loss_rows.cuh"
#include "ops/entropy_loss.h"

namespace drot {
namespace {

// Tensors of one call and the partial sums that its kernels leave behind.
struct Call {
  at::Tensor y, m, dy;  // m undefined where there is none
  bool by_row, by_column;
  double scale;
  at::Tensor dm_partial;  // [k, columns]
  at::Tensor losses;      // [blocks], fp64

  at::Tensor math(int64_t rows, int64_t columns) const {
    return at::empty({rows, columns},
                     y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  }
  at::Tensor doubles(int64_t size) const { return at::empty({size}, y.options().dtype(at::kDouble)); }
};

template <class T>
EntropyProblem<T> problem(const Call& call) {
  using Math = at::opmath_type<T>;
  return {call.y.const_data_ptr<T>(),
          call.m.defined() ? call.m.const_data_ptr<Math>() : nullptr,
          call.y.size(0),
          call.y.size(1),
          call.scale,
          call.dy.mutable_data_ptr<T>()};
}

// Rows alone, up to 8192 columns (fp64: 4096), each held in registers: Y is read once, dY written once.
template <class T, int kThreads, int kEach, bool kFactor>
void held_rows(Call& call) {
  using Math = at::opmath_type<T>;
  const auto kernel = entropy_held_rows<T, kThreads, kEach, kFactor>;
  int resident = 0;
  C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0));
  const int64_t at_once = static_cast<int64_t>(std::max(resident, 1)) *
                          at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const auto blocks = static_cast<unsigned>(std::min(at_once, call.y.size(0)));
  call.losses = call.doubles(blocks);
  if (kFactor) call.dm_partial = call.math(blocks, call.y.size(1));
  kernel<<<blocks, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
      problem<T>(call), call.losses.mutable_data_ptr<double>(),
      kFactor ? call.dm_partial.mutable_data_ptr<Math>() : nullptr);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, int kThreads, int kEach>
void held_rows(Call& call) {
  call.m.defined() ? held_rows<T, kThreads, kEach, true>(call) : held_rows<T, kThreads, kEach, false>(call);
}

// The smallest block whose registers hold a row; false where none does.
template <class T>
bool fits_registers(Call& call) {
  constexpr int kEach = sizeof(T) == 8 ? 8 : 16;  // values of a thread
  const int64_t columns = call.y.size(1);
  if (columns <= 128 * kEach) {
    held_rows<T, 128, kEach>(call);
  } else if (columns <= 256 * kEach) {
    held_rows<T, 256, kEach>(call);
  } else if (columns <= 512 * kEach) {
    held_rows<T, 512, kEach>(call);
  } else {
    return false;
  }
  return true;
}

// Any axes and any length: a pass over Y for the sums of each axis, one for the gradient.
template <class T, int kVec>
void in_passes(Call& call) {
  using Math = at::opmath_type<T>;
  const auto stream = at::cuda::getCurrentCUDAStream();
  const EntropyProblem<T> p = problem<T>(call);
  const int64_t tiles = (p.columns / kVec + kPassThreads - 1) / kPassThreads;
  TORCH_CHECK_VALUE(tiles <= INT32_MAX, "y is too wide: ", p.columns, " columns");
  const int64_t wanted = std::clamp<int64_t>(kPassBlocks / tiles, 1, std::min<int64_t>(p.rows, 65535));
  const int64_t chunk =
      std::max<int64_t>((p.rows + wanted - 1) / wanted, std::min<int64_t>(kLeastChunk, p.rows));
  const int64_t chunks = (p.rows + chunk - 1) / chunk;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(chunks));
  const auto row_blocks = static_cast<unsigned>(call.by_row ? std::min<int64_t>(p.rows, kPassBlocks) : 0);
  const auto column_blocks =
      static_cast<unsigned>(call.by_column ? (p.columns + kSumTile - 1) / kSumTile : 0);

  call.losses = call.doubles(row_blocks + column_blocks + tiles * chunks);
  double* loss = call.losses.mutable_data_ptr<double>();
  at::Tensor row_groups, column_groups, partial;
  Groups<Math> of_row, of_column;
  if (call.by_row) {
    row_groups = call.math(2, p.rows);
    of_row = {row_groups.mutable_data_ptr<Math>(), row_groups.mutable_data_ptr<Math>() + p.rows};
    row_sums<T, kVec><<<row_blocks, kPassThreads, 0, stream>>>(p, of_row, loss);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (call.by_column) {
    column_groups = call.math(2, p.columns);
    of_column = {column_groups.mutable_data_ptr<Math>(), column_groups.mutable_data_ptr<Math>() + p.columns};
    partial = call.math(2 * chunks, p.columns);
    Math* z = partial.mutable_data_ptr<Math>();
    Math* t = z + chunks * p.columns;
    column_sums<T, kVec><<<grid, kPassThreads, 0, stream>>>(p, chunk, z, t);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    close_columns<Math><<<column_blocks, dim3(kSumTile, kSumTile), 0, stream>>>(
        z, t, chunks, p.columns, p.scale, of_column, loss + row_blocks);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  Math* dm = nullptr;
  if (call.m.defined()) {
    call.dm_partial = call.math(chunks, p.columns);
    dm = call.dm_partial.mutable_data_ptr<Math>();
  }
  gradient<T, kVec>
      <<<grid, kPassThreads, 0, stream>>>(p, chunk, of_row, of_column, dm, loss + row_blocks + column_blocks);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
void run(Call& call) {
  using Math = at::opmath_type<T>;
  const bool vectors = call.y.size(1) % kVec<T> == 0 && aligned_to(call.y.const_data_ptr(), 16) &&
                       aligned_to(call.dy.const_data_ptr(), 16) &&
                       (!call.m.defined() || aligned_to(call.m.const_data_ptr<Math>(), 16));
  if (!vectors) {
    in_passes<T, 1>(call);
  } else if (call.by_column || !fits_registers<T>(call)) {
    in_passes<T, kVec<T>>(call);
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> entropy_loss_cuda(const at::Tensor& y,
                                                                 const std::optional<at::Tensor>& m,
                                                                 bool rows, bool columns, double scale) {
  check_entropy_loss(y, m, rows, columns, scale);
  const c10::cuda::CUDAGuard guard(y.device());
  const auto wide = y.options().dtype(y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  Call call{y.contiguous(), m.has_value() ? m->contiguous() : at::Tensor(), {}, rows, columns, scale, {}, {}};
  call.dy = at::empty(call.y.sizes(), call.y.options());
  at::Tensor dm = at::zeros({m.has_value() ? y.size(1) : 0}, wide), loss = at::zeros({}, wide);
  if (y.numel() == 0) return {loss, call.dy, dm};
  const auto stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "entropy_loss", [&] {
    using Math = at::opmath_type<scalar_t>;
    run<scalar_t>(call);
    if (m.has_value()) {
      sum_columns<Math><<<static_cast<unsigned>((y.size(1) + kSumTile - 1) / kSumTile),
                          dim3(kSumTile, kSumTile), 0, stream>>>(call.dm_partial.const_data_ptr<Math>(),
                                                                 call.dm_partial.size(0), y.size(1),
                                                                 dm.mutable_data_ptr<Math>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    sum_losses<Math><<<1, 1024, 0, stream>>>(call.losses.const_data_ptr<double>(), call.losses.numel(), scale,
                                             loss.mutable_data_ptr<Math>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {loss, call.dy, dm};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CUDA, m) { m.impl("entropy_loss", &entropy_loss_cuda); }

}  // namespace drot
