// The skinny kernel of sparse24_linear: y = x Wᵀ (+ bias) (+ residual, or + residual · rotation) for few
// tokens, by sparse tensor-core products (mma.sp) with W as the sparse operand. Used by sparse24_linear.cu.
//
// The packed weight is loaded into the registers as it is; its positions are the metadata of mma.sp. The
// tables in sparse24_mma.cuh show which columns a lane loads.
//
// A block has 16 · kTiles rows of W and kSkinnyTokens · kTokenTiles tokens. Its warps share the columns, and
// their sums are added in a fixed order through shared memory, which holds nothing else. Each byte of W is
// read once, by one thread. x is read by every block and comes from the L2 cache.
//
// The rows of W are permuted too: row g of tile q is row 2 kTiles g + 2 q of W, and row g + 8 is the next
// row. A lane's rows of W are then neighbours, so that it reads the rotation, whose columns they are, in
// vectors.
#pragma once

#include <cstdint>

namespace drot {

constexpr int kSkinnyWarps = 8;
constexpr int kSkinnyTokens = 8;                          // tokens that one mma instruction multiplies
constexpr int kSkinnyColumns = 64;                        // columns of W in one step of a warp
constexpr int kRotationColumns = 32;                      // columns of the residual in one step of a warp
constexpr int64_t kMostSkinnyRows = int64_t(65535) * 16;  // a grid has 65,535 blocks of at least 16 rows

// The arguments of one call; 16-bit floats as bit patterns. `in` is a multiple of kSkinnyColumns; with a
// rotation `out` is a multiple of kRotationColumns. Pointers are aligned to 16 bytes; bias, residual and
// rotation may be null.
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

// The operands of one lane in one step of 64 columns.
template <int kTiles, int kTokenTiles>
struct SkinnyStep {
  uint4 value[kTiles][2];     // 8 values of row g and of row g + 8 of a tile
  uint2 position[kTiles][2];  // positions of all 64 columns of these rows
  uint4 x[kTokenTiles][2];    // 8 of columns 0 … 31 of x, and 8 of columns 32 … 63
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
      const int64_t row = wanted < p.out ? wanted : p.out - 1;  // results of rows beyond are not stored
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
      // of 16 neighbouring columns lane t, t even, reads the first eight, and lane t + 1 the other eight
      const int64_t column = step * kSkinnyColumns + 32 * half + 8 * t;
      to.x[n][half] =
          token < p.tokens ? *reinterpret_cast<const uint4*>(p.x + token * p.in + column) : uint4{};
    }
  }
}

// 16 bits of metadata: positions of groups t, t + 4, t + 8 and t + 12 of a row.
__device__ inline uint32_t metadata(const uint2& positions, int t) {
  const uint32_t low = positions.x >> (4 * t) & 0x000f000fu, high = positions.y >> (4 * t) & 0x000f000fu;
  return ((low | low >> 12) & 0xffu) | ((high | high >> 12) & 0xffu) << 8;
}

// x: eight columns, groups 2 (t % 2) and 2 (t % 2) + 1 of four neighbouring groups. Returns one half of each
// of the four groups, as operand B needs them: columns 0 and 1 if t is even, 2 and 3 if t is odd. Each pair
// of lanes (t even, t + 1) exchanges the other halves.
__device__ inline Words4 halves_of_groups(const uint4& x, int t) {
  const bool upper = t % 2;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, upper ? x.x : x.y, 1);
  const uint32_t second = __shfl_xor_sync(0xffffffffu, upper ? x.z : x.w, 1);
  return upper ? Words4{first, second, x.y, x.w} : Words4{x.x, x.z, first, second};
}

// sum += the product of one step's columns.
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
      E::template multiply_sparse<0>(sum[q][n], {low.at[0], high.at[0], low.at[1], high.at[1]},
                                     {x[n][0].at[0], x[n][1].at[0], x[n][0].at[1], x[n][1].at[1]}, meta);
      E::template multiply_sparse<1>(sum[q][n], {low.at[2], high.at[2], low.at[3], high.at[3]},
                                     {x[n][0].at[2], x[n][1].at[2], x[n][0].at[3], x[n][1].at[3]}, meta);
    }
  }
}

// sum += residual · rotation, over the 32 rows of the rotation from row `first` on, in two products of 16
// rows. Lane t has rows 8 t … 8 t + 7.
template <class E, int kTiles, int kTokenTiles>
__device__ void add_rotation(const SkinnyProblem& p, int64_t first_row, int64_t first, int lane,
                             float (&sum)[kTiles][kTokenTiles][4]) {
  const int g = lane / 4, t = lane % 4;
  uint32_t q[8][kTiles];  // columns from 2 kTiles g on, of eight rows; two columns in a word
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

// E: Bf16Element or Fp16Element. Block (i, j) has the i-th tile of tokens and the j-th tile of rows, so that
// blocks with the same rows of W run at about the same time.
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
      // in the last iteration the same step is loaded again, from the L2 cache, to avoid a branch
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
    if (p.bias) y += E::to_float(p.bias[row]);
    if (p.residual && !p.rotation) y += E::to_float(p.residual[token * p.out + row]);
    p.y[token * p.out + row] = E::from_float(y);
  }
}

// launcher: a Launcher (common/cuda/launcher.cuh). p.out is at most kMostSkinnyRows.
template <class E, class LauncherT>
void run_sparse24_skinny(LauncherT& launcher, const SkinnyProblem& p) {
  // two tiles of rows per block halve the reads of x; they are used if the blocks still fill the GPU
  const bool two_tiles = p.out / 32 >= launcher.multiprocessors() / 2;
  const auto launch = [&](auto kernel, int rows, int tokens) {
    const dim3 grid((p.tokens + tokens - 1) / tokens, static_cast<unsigned>((p.out + rows - 1) / rows));
    launcher.launch(kernel, grid, dim3(kSkinnyWarps * 32), /*shared_bytes=*/0, p);
  };
  if (p.tokens <= kSkinnyTokens) {
    two_tiles ? launch(&sparse24_skinny<E, 2, 1>, 32, kSkinnyTokens)
              : launch(&sparse24_skinny<E, 1, 1>, 16, kSkinnyTokens);
  } else {
    two_tiles ? launch(&sparse24_skinny<E, 2, 2>, 32, 2 * kSkinnyTokens)
              : launch(&sparse24_skinny<E, 1, 2>, 16, 2 * kSkinnyTokens);
  }
}

}  // namespace drot
