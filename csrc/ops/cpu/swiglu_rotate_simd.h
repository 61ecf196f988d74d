// The parts of the CPU kernel of swiglu_rotate that are compiled for each instruction set
// (common/cpu/simd.h): one diagonal block for some tokens, and some columns of one token without a rotation.
#pragma once

#include <cstdint>

#include "common/cpu/float_rows.h"
#include "common/cpu/simd.h"

namespace drot {

// Tokens that share a load of the block.
constexpr int64_t kSwigluTokens = 4;
// The columns of a block are padded to a multiple of it, two vectors of the widest instruction set.
constexpr int64_t kSwigluColumns = 32;

// gate, up, out: the block's columns of the first token, with the distance of the next token's.
template <class T>
struct SwigluBlock {
  const T *gate, *up, *rotation;  // rotation: [size, size]
  T* out;
  int64_t gate_stride, up_stride, out_stride, tokens, size;
  int64_t padded;               // size, rounded up to kSwigluColumns
  float *block, *gated, *sums;  // scratch: [size, padded], [kSwigluTokens, size], [kSwigluTokens, padded]
};

}  // namespace drot

DROT_SIMD_DECLARE(template <class T> void swiglu_rotate_block(const SwigluBlock<T>& p);
                  template <class T> void swiglu_row(const T* gate, const T* up, T* out, int64_t columns))
