// The AVX-512 form of sparse24_linear's CPU kernel for a processor without AVX-512, for
// test_sparse24_wide.py: a pair of AVX2 registers stands for an AVX-512 register.
#include <immintrin.h>

struct Pair512 {
  __m256 low, high;
};
#define __AVX512F__ 1
#define __m512 Pair512
#define _mm512_castps256_ps512(x) (Pair512{x, x})
#define _mm512_insertf32x8(x, y, half) (Pair512{(x).low, y})
#define _mm512_loadu_ps(from) (Pair512{_mm256_loadu_ps(from), _mm256_loadu_ps((from) + 8)})
#define _mm512_storeu_ps(to, x) (_mm256_storeu_ps(to, (x).low), _mm256_storeu_ps((to) + 8, (x).high))
#define _mm512_store_ps _mm512_storeu_ps
#define _mm512_set1_ps(x) (Pair512{_mm256_set1_ps(x), _mm256_set1_ps(x)})
#define _mm512_fmadd_ps(a, b, c) \
  (Pair512{_mm256_fmadd_ps((a).low, (b).low, (c).low), _mm256_fmadd_ps((a).high, (b).high, (c).high)})

#define DROT_SIMD avx512
#include "ops/cpu/sparse24_linear_simd.cpp"

using namespace drot;

namespace {

template <class V>
void product(const V* x, const V* values, const uint8_t* positions, const V* rotation, V* y, int64_t tokens,
             int64_t in, int64_t out, float* scratch) {
  float *wide = scratch, *stream = wide + tokens * padded24(in), *rotated = stream + tokens * padded24(out);
  avx512::widen_rows<V>(x, in, tokens, in, wide);
  // the first `out` columns of x are the residual; the rotation lies by columns
  if (rotation) {
    avx512::widen_rows<V>(x, in, tokens, out, stream);
    avx512::rotate_columns<V>({stream, rotation, rotated, tokens, out}, 0, out);
  }
  avx512::sparse24_rows<V>(
      {values, positions, wide, nullptr, nullptr, rotation ? rotated : nullptr, y, tokens, in, out}, 0, out);
}

}  // namespace

#define EXPORT(V, name)                                                                                \
  extern "C" void name(const V* x, const V* values, const uint8_t* positions, const V* rotation, V* y, \
                       int64_t tokens, int64_t in, int64_t out, float* scratch) {                      \
    product<V>(x, values, positions, rotation, y, tokens, in, out, scratch);                           \
  }
EXPORT(Bf16, bfloat16)
EXPORT(Fp16, float16)
EXPORT(float, float32)
