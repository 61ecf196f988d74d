// The kernel of rope, and its launch. tests/native compiles this file for a CPU too.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "common/cuda/aligned_vector.cuh"
#include "ops/rope_math.h"

namespace drot {

constexpr int kRopeThreads = 512;

// A block has a token. A thread turns kVec neighbouring pairs of a head, then of a later head. kVec divides
// p.half; if it is not 1, all pointers are aligned to 16 bytes, and all strides are multiples of kVec.
template <class T, int kVec>
__global__ void __launch_bounds__(kRopeThreads) rope_tokens(RopeProblem<T> p) {
  const int64_t batch = blockIdx.x / p.tokens, token = blockIdx.x % p.tokens;
  const auto start = [&](const RopeStrides& s, int64_t head) {
    return batch * s.batch + head * s.head + token * s.token;
  };
  const T* const cosine = p.cosine + start(p.cosine_strides, 0);
  const T* const sine = p.sine + start(p.sine_strides, 0);
  const int half = static_cast<int>(p.half), parts = half / kVec, q_heads = static_cast<int>(p.q_heads);
  const auto to_dtype = [](float x) { return static_cast<float>(static_cast<T>(x)); };
  const int all = (q_heads + static_cast<int>(p.k_heads)) * parts;
  for (int at = threadIdx.x; at < all; at += kRopeThreads) {
    const int head = at / parts, pair = at % parts * kVec;
    const bool is_query = head < q_heads;
    const T* const in = is_query ? p.q + start(p.q_strides, head) : p.k + start(p.k_strides, head - q_heads);
    T* const out = is_query ? p.q_out + (blockIdx.x * p.q_heads + head) * 2 * half
                            : p.k_out + (blockIdx.x * p.k_heads + head - q_heads) * 2 * half;
    const auto first = load_aligned<T, kVec>(in + pair, true);
    const auto second = load_aligned<T, kVec>(in + half + pair, true);
    const auto first_cosine = load_aligned<T, kVec>(cosine + pair, true);
    const auto first_sine = load_aligned<T, kVec>(sine + pair, true);
    const auto second_cosine = load_aligned<T, kVec>(cosine + half + pair, true);
    const auto second_sine = load_aligned<T, kVec>(sine + half + pair, true);
    AlignedVector<T, kVec> turned_first, turned_second;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float x = first.get(v), y = second.get(v);
      turned_first.set(v, static_cast<T>(rope_first(x, y, first_cosine.get(v), first_sine.get(v), to_dtype)));
      turned_second.set(
          v, static_cast<T>(rope_second(x, y, second_cosine.get(v), second_sine.get(v), to_dtype)));
    }
    store_global(out + pair, turned_first);
    store_global(out + half + pair, turned_second);
  }
}

template <class T>
bool has_vectors(const RopeProblem<T>& p) {
  const auto fits = [](const T* start, const RopeStrides& s) {
    return is_aligned(start) && (s.batch | s.head | s.token) % kVectorSize<T> == 0;
  };
  return p.half % kVectorSize<T> == 0 && fits(p.q, p.q_strides) && fits(p.k, p.k_strides) &&
         fits(p.cosine, p.cosine_strides) && fits(p.sine, p.sine_strides) && is_aligned(p.q_out) &&
         is_aligned(p.k_out);
}

// Launcher: the class of common/cuda/launcher.cuh.
template <class Launcher, class T>
void run_rope(Launcher& launcher, const RopeProblem<T>& p) {
  const auto kernel = has_vectors(p) ? rope_tokens<T, kVectorSize<T>> : rope_tokens<T, 1>;
  launcher.launch(kernel, dim3(static_cast<unsigned>(p.batch * p.tokens)), dim3(kRopeThreads), 0, p);
}

}  // namespace drot
