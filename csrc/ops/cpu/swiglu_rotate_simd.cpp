#include "ops/cpu/swiglu_rotate_simd.h"

#include <cstring>

#include "ops/swiglu_rotate_math.h"

namespace drot::DROT_SIMD {
namespace {

#if defined(__AVX512F__)
typedef float Vector __attribute__((vector_size(64)));
#else
typedef float Vector __attribute__((vector_size(32)));
#endif
constexpr int64_t kWidth = sizeof(Vector) / sizeof(float);
static_assert(kSwigluColumns % (2 * kWidth) == 0);

// sums [kCount, padded] = gated [kCount, size] block [size, padded]. Each sum runs over the rows in their
// order, so that it does not depend on kCount.
template <int kCount, class T>
DROT_HOST_DEVICE void multiply(const SwigluBlock<T>& p) {
  const int64_t size = p.size, padded = p.padded;
  const float* const gated = p.gated;
  for (int64_t column = 0; column < padded; column += 2 * kWidth) {
    Vector low[kCount] = {}, high[kCount] = {};
    const float* row = p.block + column;
    for (int64_t i = 0; i < size; ++i, row += padded) {
      Vector first, second;
      std::memcpy(&first, row, sizeof(Vector));
      std::memcpy(&second, row + kWidth, sizeof(Vector));
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        const Vector x = gated[t * size + i] - Vector{};
        low[t] += x * first;
        high[t] += x * second;
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kCount; ++t) {
      std::memcpy(p.sums + t * padded + column, &low[t], sizeof(Vector));
      std::memcpy(p.sums + t * padded + column + kWidth, &high[t], sizeof(Vector));
    }
  }
}

}  // namespace

template <class T>
void swiglu_rotate_block(const SwigluBlock<T>& p) {
  for (int64_t i = 0; i < p.size; ++i) {
    float* row = p.block + i * p.padded;
#pragma omp simd
    for (int64_t j = 0; j < p.size; ++j) row[j] = widen(p.rotation[i * p.size + j]);
    for (int64_t j = p.size; j < p.padded; ++j) row[j] = 0;
  }
  for (int64_t first = 0; first < p.tokens; first += kSwigluTokens) {
    const int64_t count = p.tokens - first < kSwigluTokens ? p.tokens - first : kSwigluTokens;
    for (int64_t t = 0; t < count; ++t) {
      const T *gate = p.gate + (first + t) * p.gate_stride, *up = p.up + (first + t) * p.up_stride;
      float* gated = p.gated + t * p.size;
#pragma omp simd
      for (int64_t j = 0; j < p.size; ++j) gated[j] = swiglu(widen(gate[j]), widen(up[j]));
    }
    switch (count) {
      case 1:
        multiply<1>(p);
        break;
      case 2:
        multiply<2>(p);
        break;
      case 3:
        multiply<3>(p);
        break;
      default:
        multiply<kSwigluTokens>(p);
    }
    for (int64_t t = 0; t < count; ++t) {
      const float* sums = p.sums + t * p.padded;
      T* out = p.out + (first + t) * p.out_stride;
#pragma omp simd
      for (int64_t j = 0; j < p.size; ++j) out[j] = narrow(sums[j], T{});
    }
  }
}

template <class T>
void swiglu_row(const T* gate, const T* up, T* out, int64_t columns) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) out[j] = narrow(swiglu(widen(gate[j]), widen(up[j])), T{});
}

template void swiglu_rotate_block(const SwigluBlock<float>&);
template void swiglu_rotate_block(const SwigluBlock<Bf16>&);
template void swiglu_rotate_block(const SwigluBlock<Fp16>&);
template void swiglu_row(const float*, const float*, float*, int64_t);
template void swiglu_row(const Bf16*, const Bf16*, Bf16*, int64_t);
template void swiglu_row(const Fp16*, const Fp16*, Fp16*, int64_t);

}  // namespace drot::DROT_SIMD
