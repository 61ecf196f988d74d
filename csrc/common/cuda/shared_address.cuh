// Addresses in shared memory as the instructions take them, with 32 bits. tests/native/shared_on_host.h has
// the same functions for a CPU.
#pragma once

#include <cstdint>

namespace drot {

using SharedAddress = uint32_t;

// The address of `start`, which is the same in all lanes.
__device__ inline SharedAddress shared_address(const void* start) {
  // without the shuffle the compiler computes where shared memory begins before each use of the address
  return __shfl_sync(0xffffffffu, static_cast<uint32_t>(__cvta_generic_to_shared(start)), 0);
}

__device__ inline uint16_t load_shared(SharedAddress from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

}  // namespace drot
