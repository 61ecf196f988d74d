// AlignedVector: neighbouring values that one instruction loads or stores. The kernels of entropy_loss and
// pruned_importance read and write their matrices with it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace drot {

// Values of type T in 16 bytes, the most that one instruction loads.
template <class T>
constexpr int kVectorSize = static_cast<int>(16 / sizeof(T));

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// kVec values. They are stored as words of 32 bits, so that two 2-byte values share a register until they are
// used.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec) AlignedVector {
  static constexpr int kBytes = sizeof(T) * kVec;
  using Word =
      std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;
  static constexpr int kPerWord = sizeof(Word) / sizeof(T);
  using Bits =
      std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;

  Word word[kVec / kPerWord];

  __device__ T get(int i) const {
    const Bits bits = static_cast<Bits>(word[i / kPerWord] >> (i % kPerWord * 16));
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  // Must be called for i = 0, 1, … in this order: the first value of a word overwrites the whole word.
  __device__ void set(int i, T value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof(T));
    const Word shifted = static_cast<Word>(static_cast<Word>(bits) << (i % kPerWord * 16));
    word[i / kPerWord] = i % kPerWord == 0 ? shifted : static_cast<Word>(word[i / kPerWord] | shifted);
  }
};

// The vector at p, or zeros if not `inside`.
template <class T, int kVec>
__device__ AlignedVector<T, kVec> load_aligned(const T* p, bool inside) {
  AlignedVector<T, kVec> vector{};
  if (inside) vector = *reinterpret_cast<const AlignedVector<T, kVec>*>(p);
  return vector;
}

template <class T, int kVec>
__device__ void store_aligned(T* p, const AlignedVector<T, kVec>& vector) {
  *reinterpret_cast<AlignedVector<T, kVec>*>(p) = vector;
}

// store_aligned to global memory, with one instruction for 16 bytes: for 8.0 and 9.0, nvcc 13.0 makes four of
// store_aligned in some kernels, which use this one.
template <class T, int kVec>
__device__ void store_global(T* p, const AlignedVector<T, kVec>& vector) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(vector) == sizeof(uint4)) {
    uint4 words;
    std::memcpy(&words, &vector, sizeof(words));
    __stwb(reinterpret_cast<uint4*>(p), words);
    return;
  }
#endif
  store_aligned(p, vector);
}

// x = p[0 … kN), or ones if not `inside`: the neutral element of column scales. p is aligned to 16 bytes, or
// to one value if kN is 1.
template <int kN, class Math>
__device__ void load_values(const Math* p, bool inside, Math (&x)[kN]) {
  constexpr int kVec = kN < kVectorSize<Math> ? kN : kVectorSize<Math>;
#pragma unroll
  for (int i = 0; i < kN; i += kVec) {
    const auto vector = load_aligned<Math, kVec>(p + i, inside);
#pragma unroll
    for (int v = 0; v < kVec; ++v) x[i + v] = inside ? vector.get(v) : Math(1);
  }
}

// p[0 … kN) = x, with the alignment of load_values.
template <int kN, class Math>
__device__ void store_values(Math* p, const Math (&x)[kN]) {
  constexpr int kVec = kN < kVectorSize<Math> ? kN : kVectorSize<Math>;
#pragma unroll
  for (int i = 0; i < kN; i += kVec) {
    AlignedVector<Math, kVec> vector;
#pragma unroll
    for (int v = 0; v < kVec; ++v) vector.set(v, x[i + v]);
    store_aligned(p + i, vector);
  }
}

}  // namespace drot
