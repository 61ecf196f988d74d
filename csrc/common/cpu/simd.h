// Run-time choice of the best copy of a DROT_SIMD_SOURCES file (CMakeLists.txt), for all CPU kernels.
//
// Header of the file:      DROT_SIMD_DECLARE(void scale_rows(float* x, int64_t n))
// The file:                namespace drot::DROT_SIMD { void scale_rows(float* x, int64_t n) { ... } }
// A caller in other files: DROT_SIMD_CALL(scale_rows)(x, n);
// The environment variable DROT_SIMD=baseline, avx2 or avx512 (without AMX) limits the choice; tests use it.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#define DROT_SIMD_DECLARE(...) \
  namespace drot {             \
  namespace baseline {         \
  __VA_ARGS__;                 \
  }                            \
  namespace avx2 {             \
  __VA_ARGS__;                 \
  }                            \
  namespace avx512 {           \
  __VA_ARGS__;                 \
  }                            \
  }
#define DROT_SIMD_CALL(name)                  \
  ([](auto... args) {                         \
    switch (drot::simd_level()) {             \
      case drot::SimdLevel::avx512:           \
        return drot::avx512::name(args...);   \
      case drot::SimdLevel::avx2:             \
        return drot::avx2::name(args...);     \
      default:                                \
        return drot::baseline::name(args...); \
    }                                         \
  })
#else
#define DROT_SIMD_DECLARE(...) \
  namespace drot {             \
  namespace baseline {         \
  __VA_ARGS__;                 \
  }                            \
  }
#define DROT_SIMD_CALL(name) ([](auto... args) { return drot::baseline::name(args...); })
#endif

namespace drot {

enum class SimdLevel { baseline, avx2, avx512 };

inline SimdLevel simd_level() {
#if defined(__x86_64__)
  static const SimdLevel level = [] {
    const char* const limit = std::getenv("DROT_SIMD");
    if (limit && std::strcmp(limit, "baseline") == 0) return SimdLevel::baseline;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        !(limit && std::strcmp(limit, "avx2") == 0)) {
      return SimdLevel::avx512;
    }
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return avx2 ? SimdLevel::avx2 : SimdLevel::baseline;
  }();
  return level;
#else
  return SimdLevel::baseline;
#endif
}

}  // namespace drot
