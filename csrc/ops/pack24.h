// pack24: w [r, c], c % 8 == 0, at most two non-zeros in each four neighbours of a row (2-byte or
// 4-byte float) -> values [r, c/2] in w's dtype, positions uint8 [r, c/8]: four two-bit positions a
// byte, the lower first, ascending in each group of four.
// unpack24: the inverse.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/checks.h"

namespace drot {

inline void check_pack24(const at::Tensor& w) {
  check_matrix(w, "w");
  check_dtype(w, "w", {at::kBFloat16, at::kHalf, at::kFloat});
  TORCH_CHECK_VALUE(w.size(1) % 8 == 0, "w must have a multiple of 8 columns, got ", w.sizes());
}

inline void check_unpack24(const at::Tensor& values, const at::Tensor& positions) {
  check_matrix(values, "values");
  check_dtype(values, "values", {at::kBFloat16, at::kHalf, at::kFloat});
  check_matrix(positions, "positions");
  check_dtype(positions, "positions", {at::kByte});
  check_same_device(positions, "positions", values, "values");
  TORCH_CHECK_VALUE(values.size(1) % 4 == 0, "values must have a multiple of 4 columns, got ",
                    values.sizes());
  TORCH_CHECK_VALUE(positions.size(0) == values.size(0) && positions.size(1) == values.size(1) / 4,
                    "positions must be [", values.size(0), ", ", values.size(1) / 4, "], got ",
                    positions.sizes());
}

// row: the first faulty row, or the number of rows where there is none.
inline void check_packed_row(int64_t row, int64_t rows) {
  TORCH_CHECK_VALUE(row >= rows, "w must hold at most 2 non-zeros in each 4 neighbours, row ", row,
                    " has more");
}

inline void check_unpacked_row(int64_t row, int64_t rows) {
  TORCH_CHECK_VALUE(row >= rows, "positions must ascend in each group of 4, those of row ", row, " do not");
}

// unpack24 on the GPU without a look at the positions, for which the CPU would have to wait. Contiguous
// tensors, values aligned to 16 bytes, on the current device.
at::Tensor unpack24_unchecked_cuda(const at::Tensor& values, const at::Tensor& positions);

}  // namespace drot
