// The tensor-core products of csrc/ops/cuda/sparse24_mma.cuh on the CPU, for test_sparse24_skinny.py and
// test_spectral_step_on_cpu.py: mma.m16n8k16 and mma.sp.m16n8k32, with the operands of each lane as the PTX
// manual says. Included after block_on_cpu.h.
#pragma once

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "shared_on_host.h"

namespace on_cpu {

constexpr size_t kWarp = 32;

// Gives every lane of a warp the words of all lanes.
inline void all_lanes(uint32_t word, uint32_t (&of_lane)[kWarp]) {
  threads[current].mail = word;
  wait(State::kAtWarp);
  for (size_t i = 0; i < kWarp; ++i) {
    of_lane[i] = static_cast<uint32_t>(threads[current / kWarp * kWarp + i].mail);
  }
  wait(State::kAtWarp);
}

// The words of A and of B of each lane in multiply_dense. Between two shuffles only lanes of one warp run.
inline uint32_t words_of_lane[kWarp][6];

// The counterpart of drot::Bf16Element.
struct Bf16 {
  static float to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static uint16_t from_float(float x) {
    if (x != x) return 0x7fff;  // the sum below overflows for some NaNs
    const auto word = std::bit_cast<uint32_t>(x);
    return static_cast<uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
  }

  // The element in half 0 or 1 of a word.
  static float part(uint32_t word, int half) { return to_float(static_cast<uint16_t>(word >> (16 * half))); }

  // sum += the elements of a b [16, 8] that the current lane holds.
  template <int kColumns>
  static void add(float (&sum)[4], const float (&a)[16][kColumns], const float (&b)[kColumns][8]) {
    const int lane = static_cast<int>(current % kWarp), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < kColumns; ++k) sum[i] += a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2];
    }
  }

  static void multiply_dense(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = static_cast<int>(current % kWarp), g = lane / 4, t = lane % 4;
    uint32_t (&mine)[6] = words_of_lane[lane];
    std::copy(a, a + 4, mine);
    mine[4] = b0;
    mine[5] = b1;
    wait(State::kAtWarp);
    for (int k = 0; k < 16; ++k) {
      // column k of A and row k of B: lane 4 · (row or column) + k % 8 / 2 holds it
      const int holder = k % 8 / 2;
      for (int i = 0; i < 4; ++i) {
        const int row = g, column = 2 * t + i % 2;
        sum[i] += part(words_of_lane[4 * row + holder][i / 2 + 2 * (k / 8)], k % 2) *
                  part(words_of_lane[4 * column + holder][4 + k / 8], k % 2);
      }
    }
    wait(State::kAtWarp);
  }

  template <int kSelector>
  static void multiply_sparse(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                              uint32_t meta) {
    float packed[16][16], left[16][32] = {}, right[32][8];
    uint32_t word[kWarp];
    for (int r = 0; r < 4; ++r) {
      all_lanes(a[r], word);
      for (int i = 0; i < 64; ++i) {
        packed[i / 8 + 8 * (r % 2)][2 * (i / 2 % 4) + i % 2 + 8 * (r / 2)] = part(word[i / 2], i % 2);
      }
      all_lanes(b[r], word);
      for (int i = 0; i < 64; ++i) right[2 * (i / 2 % 4) + i % 2 + 8 * r][i / 8] = part(word[i / 2], i % 2);
    }
    all_lanes(meta, word);
    for (int row = 0; row < 16; ++row) {
      for (int i = 0; i < 16; ++i) {
        // lane t = 2 · kSelector holds the positions of columns 0 … 15, lane t + 1 of columns 16 … 31; row g
        // is in the lower 16 bits, row g + 8 in the upper 16 bits
        const uint32_t bits = word[4 * (row % 8) + 2 * kSelector + i / 8] >> (16 * (row / 8));
        const uint32_t pair = bits >> (i % 8 / 2 * 4) & 15u;
        if ((pair & 3u) >= pair >> 2) throw std::runtime_error("the two positions of a group must ascend");
        left[row][i / 2 * 4 + (i % 2 ? pair >> 2 : pair & 3u)] = packed[row][i];
      }
    }
    add(sum, left, right);
  }
};

}  // namespace on_cpu

namespace drot {

// Calls get(m, row_of) for each of the four matrices m, with row_of(i) the address of its row i.
template <class Get>
void of_matrices(SharedAddress row, Get get) {
  if (row % 16) throw std::runtime_error("ldmatrix needs addresses aligned to 16");
  // as a double, which holds any address of a process
  on_cpu::threads[on_cpu::current].mail = static_cast<double>(row);
  on_cpu::wait(on_cpu::State::kAtWarp);
  const size_t first = on_cpu::current - on_cpu::current % on_cpu::kWarp;
  for (size_t m = 0; m < 4; ++m) {
    get(m, [&](size_t i) {
      return reinterpret_cast<const uint16_t*>(
          static_cast<uintptr_t>(on_cpu::threads[first + 8 * m + i].mail));
    });
  }
  on_cpu::wait(on_cpu::State::kAtWarp);
}

// The counterpart of ldmatrix.x4.
inline void load_matrices(uint32_t (&loaded)[4], SharedAddress row) {
  const size_t g = on_cpu::current % on_cpu::kWarp / 4, t = on_cpu::current % 4;
  of_matrices(row, [&](size_t m, auto row_of) { std::memcpy(&loaded[m], row_of(g) + 2 * t, 4); });
}

// The counterpart of ldmatrix.x4.trans.
inline void load_transposed(uint32_t (&loaded)[4], SharedAddress row) {
  const size_t g = on_cpu::current % on_cpu::kWarp / 4, t = on_cpu::current % 4;
  of_matrices(row, [&](size_t m, auto row_of) {
    loaded[m] = row_of(2 * t)[g] | static_cast<uint32_t>(row_of(2 * t + 1)[g]) << 16;
  });
}

}  // namespace drot
