// Runs CUDA kernels on one thread of the CPU, for the native tests: the part of CUDA that the kernels use, as
// plain C++. It is included before the kernels, so that a host compiler compiles their sources unchanged.
//
// The threads of a block run in turns; a turn ends at a barrier or a shuffle. A barrier that not every thread
// of the block reaches, or a shuffle that not every lane of the warp reaches, is an error. The turns go
// upwards or downwards, so that a missing barrier gives a wrong result in one of the two orders.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ thread_local
#define __launch_bounds__(...)
#define __forceinline__ inline

struct dim3 {
  unsigned x, y, z;
  explicit dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1)
      : x(static_cast<unsigned>(x)), y(static_cast<unsigned>(y)), z(static_cast<unsigned>(z)) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::min;  // CUDA's min lies in no namespace

namespace on_cpu {

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Thread {
  static constexpr size_t kStack = 64 * 1024;
  jmp_buf here;  // where the thread continues; a jump is faster than setcontext, which is a system call
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state;
  dim3 index;
  double mail;  // the thread's value in a shuffle
};

inline std::vector<Thread> threads;
inline size_t current, count;
inline jmp_buf scheduler;
inline bool backwards = false;
inline std::function<void()> at_barrier;  // if set, is called at each barrier of a block
inline void (*body)(void*);
inline void* body_arguments;

// Ends the turn of the current thread: jumps back to give_turn.
inline void wait(State why) {
  threads[current].state = why;
  if (_setjmp(threads[current].here) == 0) _longjmp(scheduler, 1);
}

inline void enter() {
  for (;;) {  // the next block reuses the threads, because making a thread is slow
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

// If all threads in [first, last) wait at `what`, makes them ready and returns true.
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
    throw std::runtime_error(
        "some threads of a block wait at a barrier or shuffle that the others never reach");
  }
}

// The members of drot::Launcher (csrc/common/cuda/launcher.cuh) that launch code uses.
class Launcher {
 public:
  // dynamic_shared: the array that the kernels declare as their dynamic shared memory.
  Launcher(int multiprocessors, int64_t shared_memory, std::span<uint4> dynamic_shared)
      : multiprocessors_(multiprocessors),
        shared_memory_(shared_memory),
        dynamic_(std::as_writable_bytes(dynamic_shared)) {
    std::ranges::fill(dynamic_, kUnwritten);
  }

  int multiprocessors() const { return multiprocessors_; }
  int64_t shared_memory() const { return shared_memory_; }

  // The workspace is filled with NaN, so that a sum over a value that no thread wrote is NaN.
  template <class T>
  T* allocate(int64_t count) {
    workspaces_.emplace_back(count * sizeof(T) / sizeof(uint4) + 1);
    std::memset(static_cast<void*>(workspaces_.back().data()), 0xff,
                workspaces_.back().size() * sizeof(uint4));
    return reinterpret_cast<T*>(workspaces_.back().data());
  }

  template <class... P>
  void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes,
              std::type_identity_t<P>... args) {
    count = static_cast<size_t>(block.x) * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || count == 0 ||
        count > 1024 || shared_bytes > shared_memory_ ||
        shared_bytes > static_cast<int64_t>(dynamic_.size())) {
      throw std::runtime_error(
          "the grid, the block or the shared memory of a launch is larger than a GPU allows, or empty");
    }
    if (threads.size() < count) threads = std::vector<Thread>(count);
    auto call = [&] { kernel(args...); };
    body = [](void* arguments) { (*static_cast<decltype(call)*>(arguments))(); };
    body_arguments = &call;
    gridDim = grid;
    blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
          std::ranges::fill(dynamic_.first(static_cast<size_t>(shared_bytes)), kUnwritten);
          run_block();
        }
      }
    }
    const auto beyond = dynamic_.subspan(static_cast<size_t>(shared_bytes));
    if (shared_bytes > 0 && std::ranges::any_of(beyond, [](std::byte b) { return b != kUnwritten; })) {
      throw std::runtime_error("a kernel wrote beyond its dynamic shared memory");
    }
    std::ranges::fill(dynamic_.first(static_cast<size_t>(shared_bytes)), kUnwritten);
  }

 private:
  static constexpr std::byte kUnwritten{0xff};  // a value of such bytes is NaN

  int multiprocessors_;
  int64_t shared_memory_;
  std::span<std::byte> dynamic_;
  std::vector<std::vector<uint4>> workspaces_;
};

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::State::kAtBlock); }

// How many threads of the block have a predicate other than 0.
inline int __syncthreads_count(int predicate) {
  on_cpu::threads[on_cpu::current].mail = predicate != 0;
  on_cpu::wait(on_cpu::State::kAtBlock);
  int found = 0;
  for (size_t i = 0; i < on_cpu::count; ++i) found += on_cpu::threads[i].mail != 0;
  on_cpu::wait(on_cpu::State::kAtBlock);
  return found;
}

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

// A lane below `step` gets its own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = static_cast<int>(on_cpu::current % 32);
  return __shfl_sync(mask, value, lane < step ? lane : lane - step);
}

// Bit i is set where lane i has a predicate other than 0. Ends a turn as a shuffle does.
inline unsigned __ballot_sync(unsigned, int predicate) {
  on_cpu::threads[on_cpu::current].mail = predicate != 0;
  on_cpu::wait(on_cpu::State::kAtWarp);
  const size_t first = on_cpu::current / 32 * 32, last = std::min(first + 32, on_cpu::count);
  unsigned lanes = 0;
  for (size_t i = first; i < last; ++i) {
    lanes |= static_cast<unsigned>(on_cpu::threads[i].mail != 0) << (i - first);
  }
  on_cpu::wait(on_cpu::State::kAtWarp);
  return lanes;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

// No turn ends within an atomic operation, so plain arithmetic is atomic. A missing atomic is not found.
template <class T>
T atomicAdd(T* sum, T value) {
  return std::exchange(*sum, *sum + value);
}

template <class T>
T atomicMin(T* least, T value) {
  return std::exchange(*least, std::min(*least, value));
}
