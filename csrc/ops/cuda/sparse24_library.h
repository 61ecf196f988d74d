// The 2:4 products of cuSPARSELt, for many tokens. Where it was not there at build time, takes() says no.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/cuda/sparse24_ways.h"

namespace drot::sparse24_library {

// What a product raises where the library does not make it.
class Refused : public c10::Error {
 public:
  using c10::Error::Error;
};

// Whether the library multiplies a weight [out, in] of this dtype by so many tokens on the current device;
// if not, and `reason` is given, why.
bool takes(at::ScalarType dtype, int64_t out, int64_t in, int64_t tokens, const char** reason = nullptr);

// The library's version as one number, 0 without it.
int version();

// w: dense 2:4 [out, in], contiguous -> the library's form of it, uint8 [n].
at::Tensor compress(const at::Tensor& w);

// The fastest of its algorithms for the product with x, which it times. Not while a CUDA graph is captured.
LibraryAlgorithm search(const at::Tensor& compressed, const at::Tensor& x, int64_t out);

// y = x Wᵀ, or y += x Wᵀ. x [tokens, in], y [tokens, out], contiguous and aligned to 16 bytes. ValueError
// where `compressed` has not the size that compress gives.
void multiply(const at::Tensor& compressed, const at::Tensor& x, at::Tensor& y, bool add,
              const LibraryAlgorithm& algorithm);

}  // namespace drot::sparse24_library
