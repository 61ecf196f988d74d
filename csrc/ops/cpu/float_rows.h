// Rows of any float type as blocks of the type they are worked in, for the DROT_SIMD_SOURCES: c10's
// own types have inline functions, which such a file must not share with the rest.
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

// What a float type is worked in.
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

// Columns that are worked on at a time: few enough for their buffers to stay in the L1 cache, and
// for sums of theirs in fp32, which are then added up in fp64.
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

DROT_HOST_DEVICE float widen(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

// The exponent moves from a bias of 15 to one of 127 by a product, which normalises denormals too.
DROT_HOST_DEVICE float widen(Fp16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;  // inf and NaN
  return float_of((magnitude < 0x7c00u ? finite : special) | sign);
}

DROT_HOST_DEVICE Bf16 narrow(float x, Bf16) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0u)};
}

// Two products make overflow and denormals: after 2^112 everything above fp16's range is inf, and the
// sum with a power of two beyond the last bit kept rounds to nearest even.
DROT_HOST_DEVICE Fp16 narrow(float x, Fp16) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const float scaled = (float_of(magnitude) * 0x1p112f) * 0x1p-110f;
  const uint32_t exponent = magnitude & 0x7f800000u;
  const uint32_t bias = (exponent < 0x38800000u ? 0x38800000u : exponent) + 0x07800000u;
  const uint32_t sum = bits_of(scaled + float_of(bias));
  const uint32_t finite = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
  return {static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7e00u : finite))};
}

// A block in the type it is worked in: the row itself, or a copy in buffer.
template <class T>
DROT_HOST_DEVICE const float* load_block(const T* from, int64_t columns, float* buffer) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) buffer[j] = widen(from[j]);
  return buffer;
}
DROT_HOST_DEVICE const float* load_block(const float* from, int64_t, float*) { return from; }
DROT_HOST_DEVICE const double* load_block(const double* from, int64_t, double*) { return from; }

// Asks for a block that is read soon.
template <class T>
DROT_HOST_DEVICE void fetch_block(const T* from, int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t j = 0; j < columns; j += kLine) __builtin_prefetch(from + j);
}

// Past the caches where `stream`: for rows of a matrix that is larger than they are, which saves
// reading the memory that is to be overwritten.
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

// Before another thread may be told that streamed stores are there.
DROT_HOST_DEVICE void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace drot
