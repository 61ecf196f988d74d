#include "ops/sparsegpt_sweep.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/sparsegpt_sweep_simd.h"

namespace drot {
namespace {

// The arguments and results of one call.
template <class T>
struct Sweep {
  const T* w;
  int64_t w_stride;
  const T* factor;    // Uᵀ [columns, columns], U = Hinv
  const bool* given;  // mask [rows, columns], or null where the op chooses it
  T* w_out;
  T* err;
  bool* removed;
  int64_t rows, columns;
  int prune, group;
};

// src [rows, columns] -> tile [columns][lanes]; lanes after the last row do not change.
template <int lanes, class From, class To>
void load_tile(const From* src, int64_t stride, int64_t rows, int64_t columns, To* tile) {
  for (int64_t lane = 0; lane < rows; ++lane) {
    for (int64_t j = 0; j < columns; ++j) tile[j * lanes + lane] = src[lane * stride + j];
  }
}

// tile [columns][lanes] -> dst [rows, columns].
template <int lanes, class From, class To>
void store_tile(const From* tile, int64_t rows, int64_t columns, To* dst) {
  for (int64_t lane = 0; lane < rows; ++lane) {
    for (int64_t j = 0; j < columns; ++j) dst[lane * columns + j] = tile[j * lanes + lane];
  }
}

template <class T>
void sweep(const Sweep<T>& p) {
  constexpr int64_t lanes = kSweepLanes<T>;
  const auto sweep_tile = DROT_SIMD_CALL(sweep_tile<T>);
  at::parallel_for(0, (p.rows + lanes - 1) / lanes, 1, [&](int64_t first, int64_t last) {
    // zeros: the lanes after the last row must hold finite numbers
    std::vector<T> w(p.columns * lanes), err(p.columns * lanes);
    std::vector<OrderedKey<T>> removed(p.columns * lanes);
    const SweepTile<T> tile{p.factor, p.columns, p.given == nullptr, p.prune,
                            p.group,  w.data(),  err.data(),         removed.data()};
    for (int64_t t = first; t < last; ++t) {
      const int64_t row = t * lanes;
      const int64_t rows = std::min(lanes, p.rows - row);
      load_tile<lanes>(p.w + row * p.w_stride, p.w_stride, rows, p.columns, w.data());
      if (p.given) load_tile<lanes>(p.given + row * p.columns, p.columns, rows, p.columns, removed.data());
      sweep_tile(tile);
      store_tile<lanes>(w.data(), rows, p.columns, p.w_out + row * p.columns);
      store_tile<lanes>(err.data(), rows, p.columns, p.err + row * p.columns);
      store_tile<lanes>(removed.data(), rows, p.columns, p.removed + row * p.columns);
    }
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sparsegpt_sweep_cpu(const at::Tensor& w,
                                                                   const at::Tensor& hinv,
                                                                   const std::optional<at::Tensor>& removed,
                                                                   int64_t prune, int64_t group) {
  check_sparsegpt_sweep(w, hinv, removed, prune, group);
  const at::Tensor rows = w.stride(-1) == 1 ? w : w.contiguous();
  const at::Tensor factor = hinv.mT().contiguous();
  const at::Tensor given = removed ? removed->contiguous() : at::Tensor();
  at::Tensor w_out = at::empty(w.sizes(), w.options());
  at::Tensor err = at::empty(w.sizes(), w.options());
  at::Tensor mask = at::empty(w.sizes(), w.options().dtype(at::kBool));
  if (w.numel() == 0) return {w_out, err, mask};
  const int64_t batch = w.dim() == 3 ? w.size(0) : 1, step = w.dim() == 3 ? rows.stride(0) : 0;
  const int64_t size = w.size(-2) * w.size(-1), square = w.size(-1) * w.size(-1);
  AT_DISPATCH_FLOATING_TYPES(w.scalar_type(), "sparsegpt_sweep", [&] {
    for (int64_t i = 0; i < batch; ++i) {
      sweep<scalar_t>({rows.const_data_ptr<scalar_t>() + i * step, rows.stride(-2),
                       factor.const_data_ptr<scalar_t>() + i * square,
                       removed ? given.const_data_ptr<bool>() + i * size : nullptr,
                       w_out.mutable_data_ptr<scalar_t>() + i * size,
                       err.mutable_data_ptr<scalar_t>() + i * size, mask.mutable_data_ptr<bool>() + i * size,
                       w.size(-2), w.size(-1), static_cast<int>(prune), static_cast<int>(group)});
    }
  });
  return {w_out, err, mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(drot, CPU, m) { m.impl("sparsegpt_sweep", &sparsegpt_sweep_cpu); }

}  // namespace drot
