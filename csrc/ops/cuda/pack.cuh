// Neighbouring values that one instruction reads or writes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace drot {

// How many values of type T 16 bytes hold, the most that one instruction moves.
template <class T>
constexpr int kWide = static_cast<int>(16 / sizeof(T));

// kVec values, kept as words: two 2-byte values then share a register for as long as they are only held.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  static constexpr int kBytes = sizeof(T) * kVec;
  using Word =
      std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;
  static constexpr int kEach = sizeof(Word) / sizeof(T);  // values of a word
  using Bits =
      std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;

  Word word[kVec / kEach];

  __device__ T get(int i) const {
    const Bits bits = static_cast<Bits>(word[i / kEach] >> (i % kEach * 16));
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  // The values are set in ascending order.
  __device__ void set(int i, T value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof(T));
    const Word shifted = static_cast<Word>(static_cast<Word>(bits) << (i % kEach * 16));
    word[i / kEach] = i % kEach == 0 ? shifted : static_cast<Word>(word[i / kEach] | shifted);
  }
};

// The pack at p, zeros where it is not `inside`.
template <class T, int kVec>
__device__ Pack<T, kVec> load_pack(const T* p, bool inside) {
  Pack<T, kVec> pack{};
  if (inside) pack = *reinterpret_cast<const Pack<T, kVec>*>(p);
  return pack;
}

// kN values from p on; where they are not `inside`, ones, the factor that changes nothing. Alignment as of
// 16 bytes, or of one value where kN is 1.
template <int kN, class Math>
__device__ void load_values(const Math* p, bool inside, Math (&x)[kN]) {
  constexpr int kVec = kN < kWide<Math> ? kN : kWide<Math>;
#pragma unroll
  for (int i = 0; i < kN; i += kVec) {
    const auto pack = load_pack<Math, kVec>(p + i, inside);
#pragma unroll
    for (int v = 0; v < kVec; ++v) x[i + v] = inside ? pack.get(v) : Math(1);
  }
}

// The same the other way.
template <int kN, class Math>
__device__ void store_values(Math* p, const Math (&x)[kN]) {
  constexpr int kVec = kN < kWide<Math> ? kN : kWide<Math>;
#pragma unroll
  for (int i = 0; i < kN; i += kVec) {
    Pack<Math, kVec> pack;
#pragma unroll
    for (int v = 0; v < kVec; ++v) pack.set(v, x[i + v]);
    *reinterpret_cast<Pack<Math, kVec>*>(p + i) = pack;
  }
}

// A negative or non-finite factor makes this NaN, and with it the loss; otherwise it is 0.
template <class Math>
__device__ Math report_factor(Math m) {
  return m >= Math(0) ? m - m : static_cast<Math>(NAN);
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace drot
