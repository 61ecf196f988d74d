// The skinny kernel of sparse24_linear on the CPU (block_on_cpu.h), for test_sparse24_skinny.py.
#include "block_on_cpu.h"
//
#include "async_copy_on_host.h"
//
#include "mma_on_host.h"
//
#undef __shared__
#define __shared__  // not thread_local, whose initialisation GCC calls in templates and does not define
#include "ops/cuda/sparse24_skinny.cuh"

namespace drot {
uint4 dynamic_shared[1 << 13];  // 128 KB
}

static void check_copies() {
  for (const auto& groups : on_cpu::copies) {
    if (std::ranges::any_of(groups, [](const auto& group) { return !group.empty(); }))
      throw std::runtime_error("a copy was started and never waited for");
  }
}

// Args: the members of SkinnyProblem, the multiprocessors of the simulated GPU and the KB of shared memory of
// a block on it, whether the threads of a block run backwards, and whether copies arrive at once.
extern "C" void skinny(const uint16_t* x, const uint16_t* values, const uint8_t* positions,
                       const uint16_t* bias, const uint16_t* residual, const uint16_t* rotation, uint16_t* y,
                       int64_t in, int64_t out, int64_t tokens, int64_t multiprocessors, int64_t kilobytes,
                       bool backwards, bool early) {
  on_cpu::backwards = backwards;
  on_cpu::early = early;
  on_cpu::Launcher launcher(static_cast<int>(multiprocessors), kilobytes << 10, drot::dynamic_shared);
  drot::run_sparse24_skinny<on_cpu::Bf16>(launcher, {.x = x,
                                                     .values = values,
                                                     .positions = positions,
                                                     .bias = bias,
                                                     .residual = residual,
                                                     .rotation = rotation,
                                                     .y = y,
                                                     .in = in,
                                                     .out = out,
                                                     .tokens = static_cast<int>(tokens)});
  check_copies();
}

// Args: the members of SkinnyExperts, and as `skinny`.
extern "C" void skinny_experts(const uint16_t* x, const uint16_t* values, const uint8_t* positions,
                               const uint16_t* bias, uint16_t* y, const int32_t* ends, int64_t experts,
                               int64_t in, int64_t out, int64_t rows, int64_t kilobytes, bool backwards,
                               bool early) {
  on_cpu::backwards = backwards;
  on_cpu::early = early;
  on_cpu::Launcher launcher(/*multiprocessors=*/999, kilobytes << 10, drot::dynamic_shared);
  drot::SkinnyExperts p{};
  p.x = x;
  p.values = values;
  p.positions = positions;
  p.bias = bias;
  p.y = y;
  p.in = in;
  p.out = out;
  p.of_experts = {ends, static_cast<int>(experts), rows};
  drot::run_sparse24_skinny_experts<on_cpu::Bf16>(launcher, p);
  check_copies();
}

// The blocks of the kernel in the order of their tokens.
template <class Ask>
int64_t ask(int64_t block, const Ask& of) {
  switch (block) {
    case 0:
      return of(drot::Skinny4());
    case 1:
      return of(drot::Skinny16());
    case 2:
      return of(drot::Skinny32());
    default:
      return of(drot::Skinny64());
  }
}

extern "C" int64_t bytes_in_flight(int64_t block) {
  return ask(block, []<class B>(B) { return B::bytes_in_flight(); });
}

extern "C" int64_t shared_bytes(int64_t block, int64_t tokens) {
  return ask(block, [&]<class B>(B) { return B::shared_bytes(static_cast<int>(tokens)); });
}

extern "C" int64_t splits(int64_t blocks, int64_t steps, int64_t column_warps, int64_t multiprocessors) {
  return drot::skinny_splits(blocks, steps, static_cast<int>(column_warps),
                             static_cast<int>(multiprocessors));
}
