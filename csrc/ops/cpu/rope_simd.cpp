#include "ops/cpu/rope_simd.h"

#include "ops/rope_math.h"

namespace drot::DROT_SIMD {
namespace {

DROT_HOST_DEVICE float wide(float x) { return x; }
template <class T>
DROT_HOST_DEVICE float wide(T x) {
  return widen(x);
}
DROT_HOST_DEVICE float rounded(float x, float) { return x; }
template <class T>
DROT_HOST_DEVICE T rounded(float x, T) {
  return narrow(x, T{});
}

}  // namespace

template <class T>
void rope_head(const T* head, const T* cosine, const T* sine, T* out, int64_t half) {
#pragma omp simd
  for (int64_t j = 0; j < half; ++j) {
    const auto to_dtype = [](float x) { return wide(rounded(x, T{})); };
    const float first = wide(head[j]), second = wide(head[j + half]);
    out[j] = rounded(rope_first(first, second, wide(cosine[j]), wide(sine[j]), to_dtype), T{});
    out[j + half] =
        rounded(rope_second(first, second, wide(cosine[j + half]), wide(sine[j + half]), to_dtype), T{});
  }
}

template void rope_head(const float*, const float*, const float*, float*, int64_t);
template void rope_head(const Bf16*, const Bf16*, const Bf16*, Bf16*, int64_t);
template void rope_head(const Fp16*, const Fp16*, const Fp16*, Fp16*, int64_t);

}  // namespace drot::DROT_SIMD
