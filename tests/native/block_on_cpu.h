// Enough of CUDA to run a kernel on one thread of the CPU: the threads of a block take turns, each until it
// meets a barrier or a shuffle. Included before the kernels; a host compiler then takes them as they are.
//
// A barrier that not every thread reaches, or a shuffle that not every lane does, is an error. The turns go
// up or down, so that a barrier that is missing shows as a wrong result in one of the two orders.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __shared__ thread_local
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  explicit dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1)
      : x(static_cast<unsigned>(x)), y(static_cast<unsigned>(y)), z(static_cast<unsigned>(z)) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Thread {
  static constexpr size_t kStack = 64 * 1024;
  jmp_buf here;  // where it goes on; jumps are faster than contexts, which ask the kernel
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state;
  dim3 index;
  double mail;
};

inline std::vector<Thread> threads;
inline size_t current, count;
inline jmp_buf scheduler;
inline bool backwards = false;
inline std::function<void()> at_barrier;  // called whenever a block meets, where there is one
inline void (*body)(void*);
inline void* body_arguments;

// From a thread back to the one that gives the turns.
inline void wait(State why) {
  threads[current].state = why;
  if (_setjmp(threads[current].here) == 0) _longjmp(scheduler, 1);
}

inline void enter() {
  for (;;) {  // the next block takes the same threads: to make them is slow
    body(body_arguments);
    wait(State::kDone);
  }
}

[[gnu::noinline]] inline void give_turn() {
  Thread& thread = threads[current];
  threadIdx = thread.index;
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.here, 1);
  thread.started = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = thread.stack.get();
  start.uc_stack.ss_size = Thread::kStack;
  start.uc_link = nullptr;
  makecontext(&start, enter, 0);
  setcontext(&start);
}

// Whether all of [first, last) wait at `what`, which sets them free.
inline bool release(size_t first, size_t last, State what) {
  for (size_t i = first; i < last; ++i) {
    if (threads[i].state != what) return false;
  }
  for (size_t i = first; i < last; ++i) threads[i].state = State::kReady;
  if (what == State::kAtBlock && at_barrier) at_barrier();
  return true;
}

inline void run_block() {
  for (size_t i = 0; i < count; ++i) {
    threads[i].state = State::kReady;
    const unsigned at = static_cast<unsigned>(i);
    threads[i].index = dim3(at % blockDim.x, at / blockDim.x % blockDim.y, at / blockDim.x / blockDim.y);
  }
  do {
    for (size_t k = 0; k < count; k += 32) {
      const size_t first = backwards ? (count - 1 - k) / 32 * 32 : k, last = std::min(first + 32, count);
      do {
        for (size_t i = first; i < last; ++i) {
          current = backwards ? last - 1 - (i - first) : i;
          if (threads[current].state == State::kReady) give_turn();
        }
      } while (release(first, last, State::kAtWarp));
    }
  } while (release(0, count, State::kAtBlock));
  for (size_t i = 0; i < count; ++i) {
    if (threads[i].state == State::kDone) continue;
    threads.clear();
    throw std::runtime_error("threads wait for others that never come");
  }
}

// The part of class Gpu (csrc/ops/cuda/gpu.cuh) that launch code uses. dynamic: the array that the kernels
// declare as their dynamic shared memory.
class Gpu {
 public:
  Gpu(int processors, int64_t shared_memory, std::span<uint4> dynamic)
      : processors_(processors), shared_memory_(shared_memory), dynamic_(std::as_writable_bytes(dynamic)) {
    std::ranges::fill(dynamic_, kUnwritten);
  }

  int processors() const { return processors_; }
  int64_t shared_memory() const { return shared_memory_; }

  // Filled with NaN, so that a sum over what nobody wrote shows.
  template <class T>
  T* room(int64_t n) {
    rooms_.emplace_back(n * sizeof(T) / sizeof(uint4) + 1);
    std::memset(static_cast<void*>(rooms_.back().data()), 0xff, rooms_.back().size() * sizeof(uint4));
    return reinterpret_cast<T*>(rooms_.back().data());
  }

  template <class... P>
  void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared, std::type_identity_t<P>... args) {
    count = static_cast<size_t>(block.x) * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || count == 0 || count > 1024 ||
        shared > shared_memory_ || shared > static_cast<int64_t>(dynamic_.size())) {
      throw std::runtime_error("a GPU would refuse this launch");
    }
    if (threads.size() < count) threads = std::vector<Thread>(count);
    auto call = [&] { kernel(args...); };
    body = [](void* arguments) { (*static_cast<decltype(call)*>(arguments))(); };
    body_arguments = &call;
    gridDim = grid;
    blockDim = block;
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        std::ranges::fill(dynamic_.first(static_cast<size_t>(shared)), kUnwritten);
        run_block();
      }
    }
    const auto beyond = dynamic_.subspan(static_cast<size_t>(shared));
    if (shared > 0 && std::ranges::any_of(beyond, [](std::byte b) { return b != kUnwritten; })) {
      throw std::runtime_error("more shared memory was written than there is");
    }
    std::ranges::fill(dynamic_.first(static_cast<size_t>(shared)), kUnwritten);
  }

 private:
  static constexpr std::byte kUnwritten{0xff};  // four of them are NaN

  int processors_;
  int64_t shared_memory_;
  std::span<std::byte> dynamic_;
  std::vector<std::vector<uint4>> rooms_;
};

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::State::kAtBlock); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= sizeof(double));
  std::memcpy(&on_cpu::threads[on_cpu::current].mail, &value, sizeof(T));
  on_cpu::wait(on_cpu::State::kAtWarp);
  T got;
  std::memcpy(&got, &on_cpu::threads[on_cpu::current / 32 * 32 + static_cast<size_t>(lane)].mail, sizeof(T));
  on_cpu::wait(on_cpu::State::kAtWarp);
  return got;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, static_cast<int>(on_cpu::current % 32) ^ step);
}
