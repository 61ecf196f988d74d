// The copies of csrc/common/cuda/async_copy.cuh on the CPU. What a thread has not waited for may not be there
// yet, and may be there at once: a copy is made in the last moment that the waits allow or, if `early` is
// set, when it is started. Included after block_on_cpu.h.
#pragma once

#include <deque>

#include "shared_on_host.h"

namespace on_cpu {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
inline bool early = false;
// thread → its groups of copies, the last of which is not yet committed
inline std::vector<std::deque<std::vector<Copy>>> copies;

inline std::deque<std::vector<Copy>>& groups() {
  if (copies.size() <= current) copies.resize(current + 1);
  if (copies[current].empty()) copies[current].emplace_back();
  return copies[current];
}

}  // namespace on_cpu

namespace drot {

template <int kBytes>
void copy_async(SharedAddress address, const void* from) {
  static_assert(kBytes == 8 || kBytes == 16);
  void* const to = reinterpret_cast<void*>(address);
  if (address % kBytes || reinterpret_cast<uintptr_t>(from) % kBytes)
    throw std::runtime_error("the addresses of a copy must be aligned to its bytes");
  if (on_cpu::early) {
    std::memcpy(to, from, kBytes);
  } else {
    on_cpu::groups().back().push_back({to, from, kBytes});
  }
}

inline void commit_copies() { on_cpu::groups().emplace_back(); }

template <int kLeft>
void wait_for_copies() {
  auto& groups = on_cpu::groups();
  while (groups.size() > kLeft + 1) {
    for (const on_cpu::Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.pop_front();
  }
}

}  // namespace drot
