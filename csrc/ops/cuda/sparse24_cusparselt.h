// 2:4 products by cuSPARSELt, one of the algorithms of sparse24_linear.cu. In a build without cuSPARSELt
// supports() is false and the other functions raise an error.
//
// `compressed` is cuSPARSELt's own form of the weight, uint8 [n] and opaque; `packed` is drot's
// (ops/pack24.h).
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/cuda/sparse24_autotuner.h"

namespace drot::cusparselt {

// A call of cuSPARSELt has failed.
class Error : public c10::Error {
 public:
  using c10::Error::Error;
};

// Whether cuSPARSELt multiplies a weight [out, in] by so many tokens on the current device.
//
// Args:
//   dtype: the dtype of weight and tokens.
//   out, in: rows and columns of the weight.
//   tokens: number of tokens.
//   reason: set to the reason if the answer is no, and to null if it is yes.
bool supports(at::ScalarType dtype, int64_t out, int64_t in, int64_t tokens, const char** reason = nullptr);

// cuSPARSELt's version as one number, 0 without cuSPARSELt.
int version();

// w: dense [out, in] with 2:4 sparsity, contiguous -> compressed, uint8 [n].
at::Tensor compress(const at::Tensor& w);

// The fastest config for a call of matmul. cuSPARSELt times all of them; a CUDA graph must not be captured
// meanwhile.
CusparseltConfig search_config(const at::Tensor& compressed, const at::Tensor& x, int64_t out);

// y = x Wᵀ. ValueError if `compressed` does not have the size of this weight.
//
// Args:
//   compressed: the result of compress.
//   x: [tokens, in], contiguous, aligned to 16 bytes.
//   y: [tokens, out], contiguous, aligned to 16 bytes.
//   config: the result of search_config.
void matmul(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y, const CusparseltConfig& config);

}  // namespace drot::cusparselt
