// The kernels of pack24 and unpack24, one thread for each byte of positions, and their launch. tests/native
// compiles this file for a CPU too.
#pragma once

#include <cstdint>

#include "ops/pack24_math.h"

namespace drot {

constexpr int kPack24Threads = 256;

// `count` neighbouring values, as bit patterns; at most 16 bytes are loaded or stored at once.
template <typename word_t, int count>
struct alignas(sizeof(word_t) * count > 16 ? 16 : sizeof(word_t) * count) Words {
  word_t at[count];
};

// One thread per byte of positions (eight columns).
//
// Args:
//   w: [rows, 8 · bytes_per_row].
//   values: [rows, 4 · bytes_per_row].
//   positions: [rows, bytes_per_row].
//   bytes: rows · bytes_per_row.
//   bad: set to the first row with more than two non-zeros in a group of four.
template <typename word_t>
__global__ void pack24_kernel(const word_t* w, word_t* values, uint8_t* positions, int64_t bytes,
                              int64_t bytes_per_row, int64_t* bad) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPack24Threads + threadIdx.x;
  if (i >= bytes) {
    return;
  }
  const auto in = reinterpret_cast<const Words<word_t, 8>*>(w)[i];
  Words<word_t, 4> out;
  if (!pack24_byte(in.at, out.at, positions + i)) {
    atomicMin(reinterpret_cast<long long*>(bad), static_cast<long long>(i / bytes_per_row));
  }
  reinterpret_cast<Words<word_t, 4>*>(values)[i] = out;
}

// The inverse. bad: set to the first row whose positions do not ascend in a group of four; may be null.
template <typename word_t>
__global__ void unpack24_kernel(const word_t* values, const uint8_t* positions, word_t* w, int64_t bytes,
                                int64_t bytes_per_row, int64_t* bad) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPack24Threads + threadIdx.x;
  if (i >= bytes) {
    return;
  }
  const auto in = reinterpret_cast<const Words<word_t, 4>*>(values)[i];
  Words<word_t, 8> out;
  if (!unpack24_byte(in.at, positions[i], out.at) && bad) {
    atomicMin(reinterpret_cast<long long*>(bad), static_cast<long long>(i / bytes_per_row));
  }
  reinterpret_cast<Words<word_t, 8>*>(w)[i] = out;
}

inline dim3 pack24_blocks(int64_t bytes) {
  return dim3(static_cast<unsigned>((bytes + kPack24Threads - 1) / kPack24Threads));
}

// The arguments of pack24_kernel. bytes is at least 1; w and values are aligned to 16 bytes.
template <typename word_t, typename LauncherT>
void run_pack24(LauncherT& launcher, const word_t* w, word_t* values, uint8_t* positions, int64_t bytes,
                int64_t bytes_per_row, int64_t* bad) {
  launcher.launch(pack24_kernel<word_t>, pack24_blocks(bytes), dim3(kPack24Threads), /*shared_bytes=*/0, w,
                  values, positions, bytes, bytes_per_row, bad);
}

// The arguments of unpack24_kernel. bytes is at least 1; values and w are aligned to 16 bytes.
template <typename word_t, typename LauncherT>
void run_unpack24(LauncherT& launcher, const word_t* values, const uint8_t* positions, word_t* w,
                  int64_t bytes, int64_t bytes_per_row, int64_t* bad) {
  launcher.launch(unpack24_kernel<word_t>, pack24_blocks(bytes), dim3(kPack24Threads), /*shared_bytes=*/0,
                  values, positions, w, bytes, bytes_per_row, bad);
}

}  // namespace drot
