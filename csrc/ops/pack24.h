// pack24: w [r, c] -> values [r, c/2] in w's dtype, positions uint8 [r, c/8].
//
// w is bf16, fp16 or fp32 with c % 8 == 0 and at most two non-zeros in each group of four columns of a row. A
// byte holds four two-bit positions, the first in the lowest bits; the two positions of a group ascend.
//
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

// row: the first row that is not 2:4, or the number of rows where all are.
inline void check_packed_row(int64_t row, int64_t rows) {
  TORCH_CHECK_VALUE(row >= rows, "w must hold at most 2 non-zeros in each 4 neighbours, row ", row,
                    " has more");
}

// row: the first row with a group whose positions do not ascend, or the number of rows where all ascend.
inline void check_unpacked_row(int64_t row, int64_t rows) {
  TORCH_CHECK_VALUE(row >= rows, "positions must ascend in each group of 4; in row ", row, " they do not");
}

// unpack24 on the GPU without the check of the positions, for whose result the CPU would have to wait. The
// tensors are contiguous and on the current device, and values are aligned to 16 bytes.
at::Tensor unpack24_unchecked_cuda(const at::Tensor& values, const at::Tensor& positions);

}  // namespace drot
