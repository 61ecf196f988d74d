// Packing and unpacking of 2:4 groups, for the CPU and the CUDA kernels of pack24 and sparse24_linear.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace drot {

// Two ascending positions (0-3) of a group, which include the positions of all its non-zeros.
struct Pair24 {
  uint8_t first;
  uint8_t second;
};

// nonzero: bit i is set where element i is not zero; at most two bits are set. A group with fewer non-zeros
// keeps zeros at the lowest free positions.
DROT_HOST_DEVICE Pair24 pair24(unsigned nonzero) {
  Pair24 pair{0, 1};
  switch (nonzero) {
    case 0b0001:
    case 0b0010:
    case 0b0011:
    case 0b0000:
      return pair;
    case 0b0100:
    case 0b0101:
      pair.second = 2;
      return pair;
    case 0b1000:
    case 0b1001:
      pair.second = 3;
      return pair;
    case 0b0110:
      return {1, 2};
    case 0b1010:
      return {1, 3};
    default:
      return {2, 3};
  }
}

// Bit i is set where element i of four bit patterns of floats is not zero. -0.0 is zero, NaN is not.
template <typename word_t>
DROT_HOST_DEVICE unsigned nonzero24(const word_t* group) {
  constexpr word_t magnitude = static_cast<word_t>(~(word_t(1) << (8 * sizeof(word_t) - 1)));
  unsigned nonzero = 0;
  for (int i = 0; i < 4; ++i) {
    nonzero |= static_cast<unsigned>((group[i] & magnitude) != 0) << i;
  }
  return nonzero;
}

// Whether at most two bits are set.
DROT_HOST_DEVICE bool fits24(unsigned nonzero) {
  // n & (n - 1) clears the lowest set bit
  const unsigned rest = nonzero & (nonzero - 1);
  return (rest & (rest - 1)) == 0;
}

// group[position] of a group of four. An array that is indexed at run time would not stay in registers.
template <typename word_t>
DROT_HOST_DEVICE word_t pick24(const word_t* group, unsigned position) {
  const word_t low = position & 1 ? group[1] : group[0], high = position & 1 ? group[3] : group[2];
  return position & 2 ? high : low;
}

// Packs two groups (eight columns) into four values and one byte of positions. Returns false where a group
// holds more than two non-zeros.
template <typename word_t>
DROT_HOST_DEVICE bool pack24_byte(const word_t* in, word_t* values, uint8_t* position) {
  unsigned byte = 0;
  bool ok = true;
  for (int half = 0; half < 2; ++half) {
    const unsigned nonzero = nonzero24(in + 4 * half);
    ok = ok && fits24(nonzero);
    const Pair24 pair = pair24(nonzero);
    values[2 * half] = pick24(in + 4 * half, pair.first);
    values[2 * half + 1] = pick24(in + 4 * half, pair.second);
    byte |= static_cast<unsigned>(pair.first | (pair.second << 2)) << (4 * half);
  }
  *position = static_cast<uint8_t>(byte);
  return ok;
}

// The inverse of pack24_byte. Returns false where the two positions of a group do not ascend.
template <typename word_t>
DROT_HOST_DEVICE bool unpack24_byte(const word_t* values, uint8_t position, word_t* out) {
  bool ok = true;
  for (int half = 0; half < 2; ++half) {
    const unsigned bits = position >> (4 * half);
    const unsigned first = bits & 3, second = (bits >> 2) & 3;
    ok = ok && first < second;
    for (unsigned i = 0; i < 4; ++i) {
      out[4 * half + i] = i == first ? values[2 * half] : i == second ? values[2 * half + 1] : word_t(0);
    }
  }
  return ok;
}

}  // namespace drot
