#include "common/cpu/instructions.h"

#include <cstdlib>
#include <cstring>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/cpu/simd.h"

namespace drot {

bool has_bf16_products() {
#if defined(__x86_64__)
  return simd_level() == SimdLevel::avx512 && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi2");
#else
  return false;
#endif
}

bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  // the operating system gives a process the 8 KiB of tile registers when it asks for them
  static const bool given = [] {
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const char* const limit = std::getenv("DROT_SIMD");
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_bf16_products() && !(limit && std::strcmp(limit, "avx512") == 0) &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTiles) &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return given;
#else
  return false;
#endif
}

const char* cpu_instructions() {
  if (has_bf16_products()) return has_amx() ? "AVX512 BF16 AMX" : "AVX512 BF16";
  const SimdLevel level = simd_level();
  return level == SimdLevel::avx512 ? "AVX512" : level == SimdLevel::avx2 ? "AVX2" : "baseline";
}

}  // namespace drot
