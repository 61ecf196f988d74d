#include "ops/cpu/rope_simd.h"

#include "ops/rope_math.h"

namespace drot::DROT_SIMD {

template <class T>
void rope_head(const T* head, const T* cosine, const T* sine, T* out, int64_t half) {
#pragma omp simd
  for (int64_t j = 0; j < half; ++j) {
    const auto to_dtype = [](float x) { return widen(narrow(x, T{})); };
    const float first = widen(head[j]), second = widen(head[j + half]);
    out[j] = narrow(rope_first(first, second, widen(cosine[j]), widen(sine[j]), to_dtype), T{});
    out[j + half] =
        narrow(rope_second(first, second, widen(cosine[j + half]), widen(sine[j + half]), to_dtype), T{});
  }
}

template void rope_head(const float*, const float*, const float*, float*, int64_t);
template void rope_head(const Bf16*, const Bf16*, const Bf16*, Bf16*, int64_t);
template void rope_head(const Fp16*, const Fp16*, const Fp16*, Fp16*, int64_t);

}  // namespace drot::DROT_SIMD
