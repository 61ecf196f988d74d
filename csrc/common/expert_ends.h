// The rows of a tensor that each expert of a mixture has, one after the other: expert e has those from
// ends[e - 1], or 0, up to ends[e]. int32, so that a GPU makes it without a copy to the CPU.
#pragma once

#include "common/checks.h"

namespace drot {

// ends [experts] for `rows` rows of `other`. Its values are checked on the CPU alone.
inline void check_expert_ends(const at::Tensor& ends, int64_t experts, int64_t rows, const at::Tensor& other,
                              const char* name) {
  check_vector(ends, "ends", experts, "expert");
  check_dtype(ends, "ends", {at::kInt});
  check_same_device(ends, "ends", other, name);
  TORCH_CHECK_VALUE(experts > 0 || rows == 0, "ends must have an expert for the ", rows, " rows of ", name,
                    ", got none");
  if (!ends.is_cpu()) return;
  const auto at = ends.accessor<int32_t, 1>();
  for (int64_t e = 0; e < experts; ++e) {
    TORCH_CHECK_VALUE(at[e] >= (e == 0 ? 0 : at[e - 1]), "ends must not descend, got ", at[e], " for expert ",
                      e);
  }
  TORCH_CHECK_VALUE((experts == 0 ? 0 : at[experts - 1]) == rows, "ends must end with the ", rows,
                    " rows of ", name, ", got ", experts == 0 ? 0 : at[experts - 1]);
}

}  // namespace drot
