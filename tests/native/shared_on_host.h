// The addresses of csrc/common/cuda/shared_address.cuh on the CPU. Included after block_on_cpu.h.
#pragma once

namespace drot {

using SharedAddress = uintptr_t;

inline SharedAddress shared_address(const void* start) { return reinterpret_cast<uintptr_t>(start); }

inline uint16_t load_shared(SharedAddress from) {
  if (from % 2) throw std::runtime_error("the address of 16 bits must be even");
  return *reinterpret_cast<const uint16_t*>(from);
}

}  // namespace drot
