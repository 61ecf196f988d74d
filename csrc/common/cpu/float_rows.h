// Blocks of a row of bf16, fp16, fp32 or fp64, loaded as and stored from fp32 (fp64 for fp64). Used by the
// DROT_SIMD_SOURCES (CMakeLists.txt) of entropy_loss, pruned_importance and sparse24_linear, which cannot use
// c10's types: c10's inline functions would be compiled with AVX and shared with the rest of the binary.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace drot {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// The type of the arithmetic on values of type T.
template <class T>
struct WideOf {
  using Type = float;
};
template <>
struct WideOf<double> {
  using Type = double;
};
template <class T>
using Wide = typename WideOf<T>::Type;

// Columns of a block. Their buffers stay in the L1 cache, and the sum over one block is accurate in fp32;
// sums of blocks are added in fp64.
constexpr int64_t kBlock = 512;

DROT_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

DROT_HOST_DEVICE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

DROT_HOST_DEVICE float widen(float x) { return x; }

DROT_HOST_DEVICE float widen(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

// A product changes the bias of the exponent from 15 to 127. It normalises denormals too.
DROT_HOST_DEVICE float widen(Fp16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;  // inf and NaN
  return float_of((magnitude < 0x7c00u ? finite : special) | sign);
}

DROT_HOST_DEVICE float narrow(float x, float) { return x; }

DROT_HOST_DEVICE Bf16 narrow(float x, Bf16) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0u)};
}

// The product with 2^112 turns everything above fp16's range into inf. The sum with a power of two whose last
// bit is the last bit of the result rounds to nearest even, for denormals too.
DROT_HOST_DEVICE Fp16 narrow(float x, Fp16) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const float scaled = (float_of(magnitude) * 0x1p112f) * 0x1p-110f;
  const uint32_t exponent = magnitude & 0x7f800000u;
  const uint32_t bias = (exponent < 0x38800000u ? 0x38800000u : exponent) + 0x07800000u;
  const uint32_t sum = bits_of(scaled + float_of(bias));
  const uint32_t finite = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
  return {static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7e00u : finite))};
}

// The block in the type of the arithmetic: the row itself, or a copy in `buffer` where the types differ.
template <class T>
DROT_HOST_DEVICE const float* load_block(const T* from, int64_t columns, float* buffer) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) buffer[j] = widen(from[j]);
  return buffer;
}
DROT_HOST_DEVICE const float* load_block(const float* from, int64_t, float*) { return from; }
DROT_HOST_DEVICE const double* load_block(const double* from, int64_t, double*) { return from; }

// Prefetches a block that is read soon: into the L1 cache, or into the L2 cache if kLocality is 2.
template <int kLocality = 3, class T>
DROT_HOST_DEVICE void prefetch_block(const T* from, int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t j = 0; j < columns; j += kLine) __builtin_prefetch(from + j, 0, kLocality);
}

// stream: with non-temporal stores, which bypass the caches. Where the matrix is larger than the caches, they
// save reading the memory that is overwritten.
DROT_HOST_DEVICE void copy_block(const void* from, int64_t bytes, void* to, bool stream) {
  int64_t at = 0;
#if defined(__AVX__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    for (; at + 32 <= bytes; at += 32) {
      _mm256_stream_si256(
          reinterpret_cast<__m256i*>(static_cast<char*>(to) + at),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + at)));
    }
  }
#endif
#if defined(__x86_64__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; at + 16 <= bytes; at += 16) {
      _mm_stream_si128(
          reinterpret_cast<__m128i*>(static_cast<char*>(to) + at),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + at)));
    }
  }
#else
  (void)stream;
#endif
  std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, bytes - at);
}

template <class T>
DROT_HOST_DEVICE void store_block(const float* from, int64_t columns, T* to, bool stream) {
  T buffer[kBlock];
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) buffer[j] = narrow(from[j], T{});
  copy_block(buffer, columns * sizeof(T), to, stream);
}
DROT_HOST_DEVICE void store_block(const float* from, int64_t columns, float* to, bool stream) {
  copy_block(from, columns * sizeof(float), to, stream);
}
DROT_HOST_DEVICE void store_block(const double* from, int64_t columns, double* to, bool stream) {
  copy_block(from, columns * sizeof(double), to, stream);
}

// Makes non-temporal stores visible to other threads; call it before this thread signals that its rows are
// done.
DROT_HOST_DEVICE void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace drot
