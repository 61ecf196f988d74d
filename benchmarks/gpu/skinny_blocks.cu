// The skinny kernel of sparse24_linear with other blocks than those that it has, for skinny_blocks.py.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/async_copy.cuh"
#include "ops/cuda/sparse24_mma.cuh"
#include "ops/cuda/sparse24_skinny.cuh"

namespace {

// The members of drot::Launcher (common/cuda/launcher.cuh) that launch code uses, without torch.
struct Launcher {
  cudaStream_t stream;
  int count;
  char* workspace;
  cudaError_t error = cudaSuccess;

  int multiprocessors() const { return count; }

  template <class T>
  T* allocate(int64_t) {  // called once
    return reinterpret_cast<T*>(workspace);
  }

  template <class... P>
  void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes,
              std::type_identity_t<P>... args) {
    if (shared_bytes > 0) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes));
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
    }
    if (error == cudaSuccess) {
      kernel<<<grid, block, shared_bytes, stream>>>(args...);
      error = cudaGetLastError();
    }
  }
};

struct Variant {
  const char* name;
  int tokens;
  void (*run)(Launcher&, drot::SkinnyProblem);
  int64_t (*shared_bytes)(int tokens);
};

template <class B>
constexpr Variant variant(const char* name) {
  return {name, B::kTokens, &drot::run_sparse24_skinny_block<drot::Bf16Element, B, Launcher>,
          &B::shared_bytes};
}

#define DROT_VARIANT(...) variant<drot::SkinnyBlock<__VA_ARGS__>>(#__VA_ARGS__)
// tiles of rows, tiles of tokens, warps with different rows, chunks in the queue
const Variant kVariants[] = {
    DROT_VARIANT(1, 1, 1, 3), DROT_VARIANT(1, 1, 1, 4), DROT_VARIANT(1, 1, 1, 5), DROT_VARIANT(2, 1, 1, 2),
    DROT_VARIANT(2, 1, 1, 3), DROT_VARIANT(2, 1, 1, 4), DROT_VARIANT(1, 1, 2, 3), DROT_VARIANT(1, 1, 2, 4),
    DROT_VARIANT(1, 1, 2, 6), DROT_VARIANT(2, 1, 2, 3), DROT_VARIANT(1, 1, 4, 4), DROT_VARIANT(2, 2, 1, 3),
    DROT_VARIANT(2, 2, 2, 3), DROT_VARIANT(1, 2, 2, 4), DROT_VARIANT(1, 2, 1, 3), DROT_VARIANT(2, 2, 4, 3),
    DROT_VARIANT(1, 2, 4, 4), DROT_VARIANT(2, 4, 4, 3), DROT_VARIANT(1, 4, 4, 4), DROT_VARIANT(2, 4, 2, 3),
    DROT_VARIANT(1, 4, 8, 4), DROT_VARIANT(2, 4, 4, 2), DROT_VARIANT(2, 8, 4, 2), DROT_VARIANT(2, 8, 4, 3),
    DROT_VARIANT(1, 8, 8, 3), DROT_VARIANT(1, 8, 4, 3), DROT_VARIANT(2, 8, 8, 2),
};

}  // namespace

// The name of variant i, and the tokens of its block; null after the last.
extern "C" const char* name_of(int i, int* tokens) {
  if (i >= static_cast<int>(std::extent_v<decltype(kVariants)>)) return nullptr;
  *tokens = kVariants[i].tokens;
  return kVariants[i].name;
}

extern "C" int64_t shared_bytes(int i, int tokens) {
  return kVariants[i].shared_bytes(tokens < kVariants[i].tokens ? tokens : kVariants[i].tokens);
}

// y = x Wᵀ (+ residual · rotation), as in SkinnyProblem; the last two may be null. Returns a cudaError_t.
extern "C" int multiply(int i, const uint16_t* x, const uint16_t* values, const uint8_t* positions,
                        const uint16_t* residual, const uint16_t* rotation, uint16_t* y, char* workspace,
                        int64_t in, int64_t out, int tokens, int multiprocessors, cudaStream_t stream) {
  Launcher launcher{.stream = stream, .count = multiprocessors, .workspace = workspace};
  kVariants[i].run(launcher, {.x = x,
                              .values = values,
                              .positions = positions,
                              .bias = nullptr,
                              .residual = residual,
                              .rotation = rotation,
                              .y = y,
                              .in = in,
                              .out = out,
                              .tokens = tokens});
  return launcher.error;
}
