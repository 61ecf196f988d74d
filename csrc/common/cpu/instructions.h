// Which instructions the CPU kernels use in this process, beyond the levels of common/cpu/simd.h.
#pragma once

namespace drot {

// AVX-512 BF16 and VBMI2.
bool has_bf16_products();

// AMX: the matrix instructions for bf16, on a CPU that has bf16 products too. DROT_SIMD=avx512 leaves them
// out.
bool has_amx();

// `baseline`, `AVX2`, `AVX512`, `AVX512 BF16` or `AVX512 BF16 AMX`.
const char* cpu_instructions();

}  // namespace drot
