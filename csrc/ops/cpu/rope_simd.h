// The part of the CPU kernel of rope that is compiled for each instruction set (common/cpu/simd.h): one head
// of one token.
#pragma once

#include <cstdint>

#include "common/cpu/float_rows.h"
#include "common/cpu/simd.h"

DROT_SIMD_DECLARE(template <class T>
                  void rope_head(const T* head, const T* cosine, const T* sine, T* out, int64_t half))
