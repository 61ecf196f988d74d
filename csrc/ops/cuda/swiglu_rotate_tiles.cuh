// The kernels of swiglu_rotate: y = (SiLU(gate) · up) R with R = blockdiag(rotation), or without R. Products
// of 16-bit floats take the tensor cores (sparse24_mma.cuh). Included after sparse24_mma.cuh and
// async_copy.cuh; tests/native compiles this file for a CPU, after their counterparts.
//
// A block of threads has some tokens and 64 columns of one diagonal block. It goes over the rows of the
// diagonal block in steps of 64: it computes the gated activation of the step into shared memory, loads the
// step of the rotation beside it, and multiplies. With diagonal blocks of 64, drot's default, that is one
// step, and gate and up are read once. What lies outside of the diagonal block is zero.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/aligned_vector.cuh"
#include "common/cuda/expert_rows.cuh"
#include "ops/swiglu_rotate_math.h"

namespace drot {

constexpr int kSwigluThreads = 128, kSwigluWarps = kSwigluThreads / 32;
constexpr int kSwigluStep = 64;  // columns of a block of threads, and rows of a step
constexpr int kFewTokens = 16, kManyTokens = 64;
// The length of a row in shared memory: eight rows of 16 bytes that ldmatrix reads at once lie in different
// banks.
constexpr int kSwigluRow = kSwigluStep + 8;

// gate, up: rows of `size · blocks` neighbours, `gate_stride` and `up_stride` apart. rotation [blocks, size,
// size] or null, for one block without a rotation. out [tokens, size · blocks]. T: uint16_t, for the bit
// patterns of 16-bit floats, or float. With experts, each has `blocks` blocks of rotation.
template <class T>
struct SwigluProblem {
  const T *gate, *up, *rotation;
  T* out;
  int64_t gate_stride, up_stride, tokens, blocks, size;
  ExpertRows experts = {};
};

// Which part of the result a block of threads has: the tokens [token, stop) of the block's columns.
// rotated_by: the number of the block of rotation.
struct SwigluTile {
  int64_t block, column, token, stop, rotated_by;

  template <class T>
  __device__ SwigluTile(const SwigluProblem<T>& p, int64_t strips)
      : block(blockIdx.x % (p.blocks * strips) / strips), column(blockIdx.x % strips * kSwigluStep) {}
};

template <int kTokens, bool kExperts, class T>
__device__ SwigluTile swiglu_tile(const SwigluProblem<T>& p) {
  const int64_t strips = (p.size + kSwigluStep - 1) / kSwigluStep, place = blockIdx.x / (p.blocks * strips);
  SwigluTile tile(p, strips);
  if constexpr (kExperts) {
    const ExpertTile of = expert_tile<kTokens, kSwigluThreads>(p.experts, place);
    tile.token = of.first;
    tile.stop = of.stop;
    tile.rotated_by = of.expert * p.blocks + tile.block;
  } else {
    tile.token = place * kTokens;
    tile.stop = p.tokens;
    tile.rotated_by = tile.block;
  }
  return tile;
}

// fp32 with the conversions of the 16-bit floats.
struct Fp32Element {
  __device__ static float to_float(float x) { return x; }
  __device__ static float from_float(float x) { return x; }
};

// Calls store(row, column, x) for kTokens rows and the columns of a step, with x[0 … kVec) = SiLU(gate) · up
// of `column` and its next neighbours; 0 outside.
template <class Element, int kTokens, int kVec, class T, class Store>
__device__ void gated_step(const SwigluProblem<T>& p, const SwigluTile& tile, int64_t step, Store store) {
  constexpr int kLoads = kTokens * kSwigluStep / (kSwigluThreads * kVec), kAtOnce = kVec > 1 ? kLoads : 1;
  static_assert(kLoads * kSwigluThreads * kVec == kTokens * kSwigluStep);
#pragma unroll 1
  for (int first = 0; first < kLoads; first += kAtOnce) {
    // all loads first: the division of SiLU has a call, behind which the compiler starts no load earlier
    AlignedVector<T, kVec> gate[kAtOnce], up[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = (static_cast<int>(threadIdx.x) + (first + i) * kSwigluThreads) * kVec;
      const int64_t token = tile.token + at / kSwigluStep, column = step + at % kSwigluStep;
      const bool inside = token < tile.stop && column < p.size;
      gate[i] = load_aligned<T, kVec>(p.gate + token * p.gate_stride + tile.block * p.size + column, inside);
      up[i] = load_aligned<T, kVec>(p.up + token * p.up_stride + tile.block * p.size + column, inside);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = (static_cast<int>(threadIdx.x) + (first + i) * kSwigluThreads) * kVec;
      float x[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v)
        x[v] = swiglu(Element::to_float(gate[i].get(v)), Element::to_float(up[i].get(v)));
      store(at / kSwigluStep, at % kSwigluStep, x);
    }
  }
}

// Calls store(row, column, from) for the rows of a step of the rotation, with `from` the address of kVec
// elements from `column` on; null outside.
template <int kVec, class T, class Store>
__device__ void rotation_step(const SwigluProblem<T>& p, const SwigluTile& tile, int64_t step, Store store) {
#pragma unroll(kVec > 1 ? 4 : 1)
  for (int at = threadIdx.x * kVec; at < kSwigluStep * kSwigluStep; at += kSwigluThreads * kVec) {
    const int row = at / kSwigluStep, column = at % kSwigluStep;
    const bool inside = step + row < p.size && tile.column + column < p.size;
    const int64_t from = (tile.rotated_by * p.size + step + row) * p.size + tile.column + column;
    store(row, column, inside ? p.rotation + from : nullptr);
  }
}

// Many tokens: a warp has 16 tokens and all columns. Few tokens: a warp has the 16 tokens and 16 columns.
// kVec divides size, and the strides.
template <class Element, int kTokens, int kVec, bool kExperts>
__global__ void __launch_bounds__(kSwigluThreads) swiglu_rotate_mma(SwigluProblem<uint16_t> p) {
  constexpr bool kMany = kTokens == kManyTokens;
  constexpr int kTiles = kMany ? kSwigluStep / 8 : kSwigluStep / 8 / kSwigluWarps;  // of 8 columns, of a warp
  alignas(16) __shared__ uint16_t gated[kTokens][kSwigluRow];
  alignas(16) __shared__ uint16_t block[kSwigluStep][kSwigluRow];
  const SwigluTile tile = swiglu_tile<kTokens, kExperts>(p);
  if (tile.token >= tile.stop) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = kMany ? 16 * warp : 0, first_column = kMany ? 0 : 8 * kTiles * warp;
  constexpr int kRowBytes = 2 * kSwigluRow;
  const SharedAddress of_block = shared_address(block);
  // where this lane reads operands A and B, two columns of tiles at a time
  const int in_row = lane % 16 * kRowBytes, in_column = lane / 16 * 16;
  const SharedAddress a_from = shared_address(gated) + first_row * kRowBytes + in_row + in_column;
  const SharedAddress b_from = of_block + in_row + 2 * first_column + in_column;
  float sum[kTiles][4] = {};
  for (int64_t step = 0; step < p.size; step += kSwigluStep) {
    // the copies run while the activation is computed
    rotation_step<kVec>(p, tile, step, [&](int row, int column, const uint16_t* from) {
      if constexpr (kVec == 1) {
        block[row][column] = from == nullptr ? 0 : *from;
      } else if (from == nullptr) {
        store_aligned(block[row] + column, AlignedVector<uint16_t, kVec>{});
      } else {
        copy_async<2 * kVec>(of_block + row * kRowBytes + 2 * column, from);
      }
    });
    commit_copies();
    gated_step<Element, kTokens, kVec>(p, tile, step, [&](int row, int column, const float (&x)[kVec]) {
      AlignedVector<uint16_t, kVec> rounded;
#pragma unroll
      for (int v = 0; v < kVec; ++v) rounded.set(v, Element::from_float(x[v]));
      store_aligned(gated[row] + column, rounded);
    });
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSwigluStep; k += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, a_from + 2 * k);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        load_transposed(b, b_from + k * kRowBytes + 16 * n);
        Element::multiply_dense(sum[n], a, b[0], b[1]);
        Element::multiply_dense(sum[n + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = tile.token + first_row + lane / 4 + 8 * half;
      const int64_t column = tile.column + first_column + 8 * n + 2 * (lane % 4);
      if (token >= tile.stop) continue;
      uint16_t* const out = p.out + (token * p.blocks + tile.block) * p.size + column;
      AlignedVector<uint16_t, 2> pair;
      pair.set(0, Element::from_float(sum[n][2 * half]));
      pair.set(1, Element::from_float(sum[n][2 * half + 1]));
      if (kVec > 1 && column < p.size) {
        store_aligned(out, pair);
      } else {
        if (column < p.size) out[0] = pair.get(0);
        if (column + 1 < p.size) out[1] = pair.get(1);
      }
    }
  }
}

// A thread has one column of kFewTokens / 2 tokens. kVec divides size, and the strides.
template <int kVec, bool kExperts>
__global__ void __launch_bounds__(kSwigluThreads) swiglu_rotate_float(SwigluProblem<float> p) {
  constexpr int kShare = kFewTokens * kSwigluStep / kSwigluThreads;
  alignas(16) __shared__ float gated[kFewTokens][kSwigluStep];
  alignas(16) __shared__ float block[kSwigluStep][kSwigluStep];
  const SwigluTile tile = swiglu_tile<kFewTokens, kExperts>(p);
  if (tile.token >= tile.stop) return;
  const int column = threadIdx.x % kSwigluStep, first = threadIdx.x / kSwigluStep * kShare;
  float sum[kShare] = {};
  for (int64_t step = 0; step < p.size; step += kSwigluStep) {
    gated_step<Fp32Element, kFewTokens, kVec>(p, tile, step, [&](int row, int at, const float (&x)[kVec]) {
      store_values<kVec>(gated[row] + at, x);
    });
    rotation_step<kVec>(p, tile, step, [&](int row, int at, const float* from) {
      store_aligned(block[row] + at, load_aligned<float, kVec>(from, from != nullptr));
    });
    __syncthreads();
    for (int k = 0; k < kSwigluStep; ++k) {
      const float r = block[k][column];
#pragma unroll
      for (int i = 0; i < kShare; ++i) sum[i] += gated[first + i][k] * r;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int64_t token = tile.token + first + i;
    if (token < tile.stop && tile.column + column < p.size) {
      p.out[(token * p.blocks + tile.block) * p.size + tile.column + column] = sum[i];
    }
  }
}

// Without a rotation. A thread has kVec columns of some tokens; kVec divides size, and the strides.
template <class Element, int kVec, class T>
__global__ void __launch_bounds__(kSwigluThreads) swiglu_alone(SwigluProblem<T> p) {
  const SwigluTile tile = swiglu_tile<kFewTokens, false>(p);
  gated_step<Element, kFewTokens, kVec>(p, tile, tile.column,
                                        [&](int row, int column, const float (&x)[kVec]) {
                                          const int64_t token = tile.token + row, at = tile.column + column;
                                          if (token >= tile.stop || at >= p.size) return;
                                          AlignedVector<T, kVec> y;
#pragma unroll
                                          for (int v = 0; v < kVec; ++v) y.set(v, Element::from_float(x[v]));
                                          store_global(p.out + token * p.size + at, y);
                                        });
}

// The number of blocks of threads.
template <class T>
int64_t swiglu_tiles(const SwigluProblem<T>& p, int64_t tokens) {
  const int64_t places =
      p.experts.ends == nullptr ? (p.tokens + tokens - 1) / tokens : expert_places(p.experts, tokens);
  return places * p.blocks * ((p.size + kSwigluStep - 1) / kSwigluStep);
}

template <class T>
bool swiglu_in_vectors(const SwigluProblem<T>& p) {
  constexpr int kVec = kVectorSize<T>;
  return p.size % kVec == 0 && p.gate_stride % kVec == 0 && p.up_stride % kVec == 0 && is_aligned(p.gate) &&
         is_aligned(p.up) && is_aligned(p.rotation);
}

template <class Element, class LauncherT, class T>
void run_swiglu_alone(LauncherT& launcher, const SwigluProblem<T>& p) {
  const auto kernel =
      swiglu_in_vectors(p) ? swiglu_alone<Element, kVectorSize<T>, T> : swiglu_alone<Element, 1, T>;
  launcher.launch(kernel, dim3(swiglu_tiles(p, kFewTokens)), dim3(kSwigluThreads), 0, p);
}

template <class Element, bool kExperts, class LauncherT>
void run_swiglu_rotate_mma(LauncherT& launcher, const SwigluProblem<uint16_t>& p) {
  constexpr int kVec = kVectorSize<uint16_t>;
  const int64_t experts = kExperts ? std::min<int64_t>(p.experts.experts, p.tokens) : 1;
  const bool vectors = swiglu_in_vectors(p), many = p.tokens / experts > kFewTokens;
  const auto kernel = many ? (vectors ? swiglu_rotate_mma<Element, kManyTokens, kVec, kExperts>
                                      : swiglu_rotate_mma<Element, kManyTokens, 1, kExperts>)
                           : (vectors ? swiglu_rotate_mma<Element, kFewTokens, kVec, kExperts>
                                      : swiglu_rotate_mma<Element, kFewTokens, 1, kExperts>);
  launcher.launch(kernel, dim3(swiglu_tiles(p, many ? kManyTokens : kFewTokens)), dim3(kSwigluThreads), 0, p);
}

template <class Element, class LauncherT>
void run_swiglu_rotate_16(LauncherT& launcher, const SwigluProblem<uint16_t>& p) {
  if (p.rotation == nullptr) return run_swiglu_alone<Element>(launcher, p);
  p.experts.ends == nullptr ? run_swiglu_rotate_mma<Element, false>(launcher, p)
                            : run_swiglu_rotate_mma<Element, true>(launcher, p);
}

template <bool kExperts, class LauncherT>
void run_swiglu_rotate_fp32(LauncherT& launcher, const SwigluProblem<float>& p) {
  const auto kernel = swiglu_in_vectors(p) ? swiglu_rotate_float<kVectorSize<float>, kExperts>
                                           : swiglu_rotate_float<1, kExperts>;
  launcher.launch(kernel, dim3(swiglu_tiles(p, kFewTokens)), dim3(kSwigluThreads), 0, p);
}

template <class LauncherT>
void run_swiglu_rotate_float(LauncherT& launcher, const SwigluProblem<float>& p) {
  if (p.rotation == nullptr) return run_swiglu_alone<Fp32Element>(launcher, p);
  p.experts.ends == nullptr ? run_swiglu_rotate_fp32<false>(launcher, p)
                            : run_swiglu_rotate_fp32<true>(launcher, p);
}

}  // namespace drot
