// sparse24_linear for few tokens, as sparse tensor-core products (mma.sp m16n8k32) whose sparse factor
// is W: the packed format goes into the registers as it is, two-bit positions being the metadata.
//
// A block owns 16 · kTiles rows of W and kSkinnyTokens · kTokenTiles tokens; its warps share out the columns,
// and their sums are added in a fixed order. Nothing but those sums passes through shared memory: each byte
// of W is read once, by one thread, and x, which every block reads, comes from the L2 cache.
//
// The tensor core does not care in which order a product's columns come, as long as both factors have
// the same. So each thread takes 16 neighbouring bytes of W (four groups of four columns), and which
// columns those stand for is put right in x. With g = lane / 4, t = lane % 4: in columns 64 s … 64 s + 63
// thread t of a quad holds groups 4 t … 4 t + 3; the first product takes groups 0 and 1 of each thread,
// the second 2 and 3. Rows too: row g of tile q stands for row 2 kTiles g + 2 q of W, row g + 8 for the
// one after it, which lets the rotation, whose rows are columns of Q, be read in vectors.
#pragma once

#include <cstdint>

namespace drot {

constexpr int kSkinnyWarps = 8;
// Tokens of one product, and columns of W that a warp takes at a time.
constexpr int kSkinnyTokens = 8, kSkinnyColumns = 64;
// Columns of the residual that a warp takes at a time.
constexpr int kRotationColumns = 32;
// A grid has 65,535 blocks of at least 16 rows.
constexpr int64_t kMostSkinnyRows = int64_t(65535) * 16;

// 16-bit floats as words. Block (i, j) of the grid has the i-th tokens and the j-th rows, so that blocks
// which read the same part of W run at about the same time. in is a multiple of kSkinnyColumns; where there
// is a rotation, out is one of
// 32. Pointers are aligned to 16 bytes; bias, residual and rotation may be null.
struct SkinnyProblem {
  const uint16_t* x;         // [tokens, in]
  const uint16_t* values;    // [out, in/2]
  const uint8_t* positions;  // [out, in/8]
  const uint16_t* bias;      // [out]
  const uint16_t* residual;  // [tokens, out]
  const uint16_t* rotation;  // [out, out]
  uint16_t* y;               // [tokens, out]
  int64_t in, out;
  int tokens;
};

struct Words4 {
  uint32_t at[4];
};

template <class Vector>
__device__ Words4 words(const Vector& v) {
  return {v.x, v.y, v.z, v.w};
}

// What one warp needs of 64 columns.
template <int kTiles, int kTokenTiles>
struct SkinnyStep {
  uint4 value[kTiles][2];     // 8 values of row g and of row g + 8
  uint2 position[kTiles][2];  // of all 64 columns of these rows
  uint4 x[kTokenTiles][2];    // 8 columns of x each
};

template <int kTiles, int kTokenTiles>
__device__ void load_step(const SkinnyProblem& p, int64_t first_row, int64_t step, int lane,
                          SkinnyStep<kTiles, kTokenTiles>& to) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t wanted = first_row + 2 * kTiles * g + 2 * q + half;
      const int64_t row = wanted < p.out ? wanted : p.out - 1;  // what is computed beyond is not stored
      to.value[q][half] =
          __ldcs(reinterpret_cast<const uint4*>(p.values + row * (p.in / 2) + step * 32 + 8 * t));
      to.position[q][half] =
          __ldcs(reinterpret_cast<const uint2*>(p.positions + row * (p.in / 8) + step * 8));
    }
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int token = kSkinnyTokens * n + g;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // threads t of even number read the first eight of 16 columns, the next thread the others
      const int64_t column = step * kSkinnyColumns + 32 * half + 8 * t;
      to.x[n][half] =
          token < p.tokens ? *reinterpret_cast<const uint4*>(p.x + token * p.in + column) : uint4{};
    }
  }
}

// Positions of group t of each of the four threads of a quad, for a row: 16 bits of metadata.
__device__ inline uint32_t metadata(const uint2& positions, int t) {
  const uint32_t low = positions.x >> (4 * t) & 0x000f000fu, high = positions.y >> (4 * t) & 0x000f000fu;
  return ((low | low >> 12) & 0xffu) | ((high | high >> 12) & 0xffu) << 8;
}

// The two neighbouring columns that thread t feeds of each of four groups. A thread has read both halves
// of two groups and wants one half of four: it swaps with its neighbour.
__device__ inline Words4 halves_of_groups(const uint4& x, int t) {
  const bool upper = t % 2;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, upper ? x.x : x.y, 1);
  const uint32_t second = __shfl_xor_sync(0xffffffffu, upper ? x.z : x.w, 1);
  return upper ? Words4{first, second, x.y, x.w} : Words4{x.x, x.z, first, second};
}

template <class E, int kTiles, int kTokenTiles>
__device__ void add_step(const SkinnyStep<kTiles, kTokenTiles>& from, int lane,
                         float (&sum)[kTiles][kTokenTiles][4]) {
  const int t = lane % 4;
  Words4 x[kTokenTiles][2];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    x[n][0] = halves_of_groups(from.x[n][0], t);
    x[n][1] = halves_of_groups(from.x[n][1], t);
  }
#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
    const Words4 low = words(from.value[q][0]), high = words(from.value[q][1]);
    const uint32_t meta = metadata(from.position[q][0], t) | metadata(from.position[q][1], t) << 16;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      // metadata of the first product comes from threads 0 and 1 of a quad, of the second from 2 and 3
      E::template multiply_sparse<0>(sum[q][n], {low.at[0], high.at[0], low.at[1], high.at[1]},
                                     {x[n][0].at[0], x[n][1].at[0], x[n][0].at[1], x[n][1].at[1]}, meta);
      E::template multiply_sparse<1>(sum[q][n], {low.at[2], high.at[2], low.at[3], high.at[3]},
                                     {x[n][0].at[2], x[n][1].at[2], x[n][0].at[3], x[n][1].at[3]}, meta);
    }
  }
}

// sum += residual · rotation, over the 32 rows of the rotation from `first` on. Thread t takes rows
// 8 t … 8 t + 7 of them, in two products of 16.
template <class E, int kTiles, int kTokenTiles>
__device__ void add_rotation(const SkinnyProblem& p, int64_t first_row, int64_t first, int lane,
                             float (&sum)[kTiles][kTokenTiles][4]) {
  const int g = lane / 4, t = lane % 4;
  uint32_t q[8][kTiles];  // columns 2 kTiles g … of eight rows, two columns a word
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint16_t* from = p.rotation + (first + 8 * t + i) * p.out + first_row + 2 * kTiles * g;
    if constexpr (kTiles == 2) {
      const uint2 two = __ldcs(reinterpret_cast<const uint2*>(from));
      q[i][0] = two.x;
      q[i][1] = two.y;
    } else {
      q[i][0] = __ldcs(reinterpret_cast<const uint32_t*>(from));
    }
  }
  Words4 r[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int token = kSkinnyTokens * n + g;
    r[n] =
        words(token < p.tokens ? *reinterpret_cast<const uint4*>(p.residual + token * p.out + first + 8 * t)
                               : uint4{});
  }
  const auto lower = [](uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; };
  const auto upper = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t a = q[4 * k][tile], b = q[4 * k + 1][tile], c = q[4 * k + 2][tile],
                     d = q[4 * k + 3][tile];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        E::multiply_dense(sum[tile][n], {lower(a, b), upper(a, b), lower(c, d), upper(c, d)}, r[n].at[2 * k],
                          r[n].at[2 * k + 1]);
      }
    }
  }
}

// E: the 16-bit float; wide, narrow, multiply_sparse<selector> and multiply_dense.
template <class E, int kTiles, int kTokenTiles>
__global__ void __launch_bounds__(kSkinnyWarps * 32) sparse24_skinny(SkinnyProblem p) {
  constexpr int kSums = kTiles * kTokenTiles * 4;
  const int first_token = static_cast<int>(blockIdx.x) * kSkinnyTokens * kTokenTiles;
  p.x += first_token * p.in;
  p.y += first_token * p.out;
  if (p.residual) p.residual += first_token * p.out;
  p.tokens -= first_token;
  __shared__ float partial[kSkinnyWarps][kSums][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * 16 * kTiles;
  float sum[kTiles][kTokenTiles][4] = {};

  const int64_t steps = p.in / kSkinnyColumns;
  if (warp < steps) {
    SkinnyStep<kTiles, kTokenTiles> now, next;
    load_step(p, first_row, warp, lane, now);
    for (int64_t step = warp; step < steps; step += kSkinnyWarps) {
      // the last step is loaded once more, which is simpler than not to, and comes from the L2 cache
      const int64_t after = step + kSkinnyWarps < steps ? step + kSkinnyWarps : step;
      load_step(p, first_row, after, lane, next);
      add_step<E>(now, lane, sum);
      now = next;
    }
  }
  if (p.rotation) {
    for (int64_t first = warp * kRotationColumns; first < p.out; first += kSkinnyWarps * kRotationColumns) {
      add_rotation<E>(p, first_row, first, lane, sum);
    }
  }

#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[warp][(q * kTokenTiles + n) * 4 + i][lane] = sum[q][n][i];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kSums * 32; at += kSkinnyWarps * 32) {
    const int i = at / 32, of = at % 32;
    const int tile = i / 4 / kTokenTiles, token = i / 4 % kTokenTiles * kSkinnyTokens + of % 4 * 2 + i % 2;
    const int64_t row = first_row + 2 * kTiles * (of / 4) + 2 * tile + i % 4 / 2;
    if (token >= p.tokens || row >= p.out) continue;
    float y = 0;
#pragma unroll
    for (int w = 0; w < kSkinnyWarps; ++w) y += partial[w][i][of];
    if (p.bias) y += E::wide(p.bias[row]);
    if (p.residual && !p.rotation) y += E::wide(p.residual[token * p.out + row]);
    p.y[token * p.out + row] = E::narrow(y);
  }
}

// gpu: a Gpu (gpu.cuh). p.out is at most kMostSkinnyRows.
template <class E, class Device>
void run_sparse24_skinny(Device& gpu, const SkinnyProblem& p) {
  // two tiles of rows read x half as often, where the blocks are enough for every multiprocessor
  const bool wide = p.out / 32 >= gpu.processors() / 2;
  const auto launch = [&](auto kernel, int rows, int tokens) {
    const dim3 grid((p.tokens + tokens - 1) / tokens, static_cast<unsigned>((p.out + rows - 1) / rows));
    gpu.launch(kernel, grid, dim3(kSkinnyWarps * 32), 0, p);
  };
  if (p.tokens <= kSkinnyTokens) {
    wide ? launch(&sparse24_skinny<E, 2, 1>, 32, kSkinnyTokens)
         : launch(&sparse24_skinny<E, 1, 1>, 16, kSkinnyTokens);
  } else {
    wide ? launch(&sparse24_skinny<E, 2, 2>, 32, 2 * kSkinnyTokens)
         : launch(&sparse24_skinny<E, 1, 2>, 16, 2 * kSkinnyTokens);
  }
}

}  // namespace drot
