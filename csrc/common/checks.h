// Input checks for the CPU and CUDA kernels of all ops. A message states what was expected and what came.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <string>

namespace drot {

// Shape [rows, columns].
inline void check_matrix(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.dim() == 2, name, " must be [rows, columns], got ", t.sizes());
}

// Shape [length]; `each` names in the message what a value belongs to.
inline void check_vector(const at::Tensor& t, const char* name, int64_t length, const char* each) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == length, name, " must be [", length, "], one value for each ",
                    each, ", got ", t.sizes());
}

// Shape [..., n, n].
inline void check_square(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.dim() >= 2 && t.size(-1) == t.size(-2), name, " must be [..., n, n], got ", t.sizes());
}

inline void check_same_shape(const at::Tensor& t, const char* name, const at::Tensor& other,
                             const char* other_name) {
  TORCH_CHECK_VALUE(t.sizes() == other.sizes(), name, " must have the shape of ", other_name, ", ",
                    other.sizes(), ", got ", t.sizes());
}

inline void check_dtype(const at::Tensor& t, const char* name,
                        std::initializer_list<at::ScalarType> allowed) {
  std::string list;
  for (const auto dtype : allowed) {
    if (t.scalar_type() == dtype) {
      return;
    }
    list += std::string(list.empty() ? "" : ", ") + at::toString(dtype);
  }
  TORCH_CHECK_VALUE(false, name, " must be one of ", list, ", got ", t.scalar_type());
}

inline void check_same_dtype(const at::Tensor& t, const char* name, const at::Tensor& other,
                             const char* other_name) {
  TORCH_CHECK_VALUE(t.scalar_type() == other.scalar_type(), name, " must have the dtype of ", other_name,
                    ", ", other.scalar_type(), ", got ", t.scalar_type());
}

inline void check_same_device(const at::Tensor& t, const char* name, const at::Tensor& other,
                              const char* other_name) {
  TORCH_CHECK_VALUE(t.device() == other.device(), name, " must be on the device of ", other_name, ", ",
                    other.device(), ", got ", t.device());
}

// `prune` scores of every `group` neighbouring columns are removed; group = 0 is the whole row.
inline void check_groups(int64_t prune, int64_t group, int64_t columns, int64_t max_group) {
  TORCH_CHECK_VALUE(group >= 0 && group <= max_group, "group must be 0 (the whole row) or 1 to ", max_group,
                    ", got ", group);
  TORCH_CHECK_VALUE(group == 0 || columns % group == 0, "group must divide the ", columns, " columns, got ",
                    group);
  const int64_t width = group == 0 ? columns : group;
  TORCH_CHECK_VALUE(prune >= 0 && prune <= width, "prune must be 0 to ", width,
                    ", the width of a group, got ", prune);
}

}  // namespace drot
