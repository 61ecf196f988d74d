// Copies from global to shared memory that run beside the thread that starts them (cp.async).
//
// A group has the copies that a thread has started since its last commit_copies. They are there for this
// thread alone, after wait_for_copies; other threads need a barrier too. tests/native/async_copy_on_host.h
// has the same functions for a CPU.
#pragma once

#include <cstdint>

#include "common/cuda/shared_address.cuh"

namespace drot {

// kBytes: 8 or 16, to which both addresses are aligned.
template <int kBytes>
__device__ inline void copy_async(SharedAddress to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kLeft groups of this thread are not yet there.
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace drot
