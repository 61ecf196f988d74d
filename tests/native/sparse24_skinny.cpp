// The kernel of sparse24_linear for few tokens on the CPU (block_on_cpu.h), for test_sparse24_skinny.py.
#include "block_on_cpu.h"
//
#include "mma_on_host.h"
//
#include "ops/cuda/sparse24_skinny.cuh"

using namespace drot;

namespace {

template <int kTiles, int kTokenTiles>
void run(const SkinnyProblem& p) {
  const auto blocks = static_cast<unsigned>((p.out + 16 * kTiles - 1) / (16 * kTiles));
  on_cpu::Gpu(1, 0, {}).launch(&sparse24_skinny<on_cpu::Bf16, kTiles, kTokenTiles>, dim3(blocks),
                               dim3(kSkinnyWarps * 32), 0, p);
}

}  // namespace

extern "C" void skinny(const uint16_t* x, const uint16_t* values, const uint8_t* positions,
                       const uint16_t* bias, const uint16_t* residual, const uint16_t* rotation, uint16_t* y,
                       int64_t in, int64_t out, int64_t tokens, int64_t tiles) {
  const SkinnyProblem p{x, values, positions, bias, residual, rotation, y, in, out, static_cast<int>(tokens)};
  if (tiles == 2) {
    tokens <= kSkinnyTokens ? run<2, 1>(p) : run<2, 2>(p);
  } else {
    tokens <= kSkinnyTokens ? run<1, 1>(p) : run<1, 2>(p);
  }
}
