// Runs the source of a CUDA kernel on threads of the CPU, one for each thread of a block, one block
// after the other: its indices, barriers and shuffles, not its speed. Included before the kernel.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1, y = 1;
};
inline Dim3 blockDim, gridDim;
inline thread_local Dim3 threadIdx, blockIdx;

namespace host {

constexpr int kWarp = 32;
struct Warp {
  std::barrier<> meet{kWarp};
  uint64_t slot[kWarp] = {};
};
inline std::barrier<>* block = nullptr;
inline std::deque<Warp>* warps = nullptr;
inline thread_local int number = 0;

// Blocks of whole warps.
template <class Kernel>
void launch(Dim3 grid, Dim3 threads, Kernel kernel) {
  gridDim = grid;
  blockDim = threads;
  const int count = threads.x * threads.y;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      std::barrier<> barrier(count);
      std::deque<Warp> all(count / kWarp);
      block = &barrier;
      warps = &all;
      std::vector<std::thread> running;
      for (int i = 0; i < count; ++i) {
        running.emplace_back([=, &kernel] {
          number = i;
          threadIdx = {i % threads.x, i / threads.x};
          blockIdx = {x, y};
          kernel();
          block->arrive_and_drop();  // a thread that has returned is waited for no longer
        });
      }
      for (auto& thread : running) thread.join();
    }
  }
}

}  // namespace host

inline void __syncthreads() { host::block->arrive_and_wait(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  host::Warp& warp = (*host::warps)[host::number / host::kWarp];
  const int lane = host::number % host::kWarp;
  std::memcpy(&warp.slot[lane], &value, sizeof(T));
  warp.meet.arrive_and_wait();
  T other;
  std::memcpy(&other, &warp.slot[lane ^ lanes], sizeof(T));
  warp.meet.arrive_and_wait();
  return other;
}

using std::max;
using std::min;
