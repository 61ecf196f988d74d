// The skinny kernel of sparse24_linear: y = x Wᵀ (+ bias) (+ residual, or + residual · rotation) for few
// tokens, by sparse tensor-core products (mma.sp) with W as the sparse operand. Used by sparse24_linear.cu.
//
// The packed weight is multiplied as it is; its positions are the metadata of mma.sp. The tables in
// sparse24_mma.cuh show which columns a lane loads.
//
// A block has 16 · kTiles rows of W and kSkinnyTokens · kTokenTiles tokens. Its warps share the columns, and
// their sums are added in a fixed order through shared memory. Each value of W is read once, by one block. x
// is read by every block and comes from the L2 cache.
//
// A product with few tokens waits for W. The block has a queue of chunks of W in shared memory, of which all
// but one are on their way while it multiplies: skinny_bytes_in_flight says how many bytes. A chunk has one
// step of 64 columns for each warp. It is loaded row by row, so that a warp reads 512 neighbouring bytes of
// one row at once: where each warp loaded its own 64 bytes of eight rows, an H200 read 1.9 of its 4.8 TB/s.
// Where the blocks are too few for the GPU, several share the columns of the same rows (split-K), and a
// second kernel adds their sums in a fixed order.
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
  int splits = 1;            // blocks that share the columns of the same rows
  float* partial = nullptr;  // [splits, tokens, out]; null for one split
};

// Chunks in the queue of a block.
constexpr int skinny_stages(int tiles) { return tiles == 2 ? 5 : 8; }

// A row of a chunk in shared memory: its values in vectors of 16 bytes, and its positions in vectors of 8.
// Each row is a little longer than what it holds, so that the lanes that read at once read different banks.
constexpr int kValueVectors = kSkinnyWarps * 4, kPositionVectors = kSkinnyWarps;
constexpr int value_pitch(int tiles) { return kValueVectors + (tiles == 2 ? 1 : 2); }
constexpr int kPositionPitch = kPositionVectors + 1;

// Vectors of 16 bytes in a chunk.
constexpr int skinny_chunk(int tiles) { return 16 * tiles * value_pitch(tiles) + 8 * tiles * kPositionPitch; }

// Bytes of the queue of a block.
constexpr int64_t skinny_shared_bytes(int tiles) {
  return int64_t(skinny_stages(tiles)) * skinny_chunk(tiles) * 16;
}

// the sums of the warps take the place of the queue, for two tiles of tokens at most
static_assert(kSkinnyWarps * 32 * 2 * 4 * 4 <= skinny_shared_bytes(1) &&
              kSkinnyWarps * 32 * 2 * 2 * 4 * 4 <= skinny_shared_bytes(2));

// Bytes of W that are on their way to a block while it multiplies. A row has 64 bytes of values and 8 of
// positions in a step.
constexpr int64_t skinny_bytes_in_flight(int tiles) {
  return int64_t(skinny_stages(tiles) - 1) * kSkinnyWarps * 16 * tiles * (64 + 8);
}

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

// The queue of the weights of a block.
template <int kTiles>
struct SkinnyQueue {
  static constexpr int kStages = skinny_stages(kTiles), kThreads = kSkinnyWarps * 32, kRows = 16 * kTiles;
  uint4* shared;  // kStages chunks: the values of all rows, then their positions

  __device__ uint4* values(int stage, int row) const {
    return shared + stage * skinny_chunk(kTiles) + row * value_pitch(kTiles);
  }
  __device__ uint2* positions(int stage, int row) const {
    return reinterpret_cast<uint2*>(values(stage, kRows)) + row * kPositionPitch;
  }

  // step: of the chunk.
  template <int kTokenTiles>
  __device__ void read(int stage, int step, SkinnyStep<kTiles, kTokenTiles>& to) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int row = 2 * kTiles * g + i;
      to.value[i / 2][i % 2] = values(stage, row)[4 * step + t];
      to.position[i / 2][i % 2] = positions(stage, row)[step];
    }
  }
};
// What a thread loads of each chunk: in a warp the values of every kSkinnyWarps-th row, one vector a lane,
// and eight threads the positions of a row.
template <int kTiles>
struct SkinnyLoader {
  static constexpr int kRows = 16 * kTiles, kEach = kRows / kSkinnyWarps;
  static_assert(kValueVectors == 32 && kRows * kPositionVectors <= kSkinnyWarps * 32);
  const uint16_t* value[kEach];
  const uint8_t* position;
  int values_left, positions_left;  // vectors up to the end of the columns, from those of this thread on

  // The steps [begin, end) of the rows from first_row on.
  __device__ SkinnyLoader(const SkinnyProblem& p, int64_t first_row, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto row_of_w = [&](int row) {  // results of rows beyond are not stored
      return first_row + row < p.out ? first_row + row : p.out - 1;
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      value[i] = p.values + row_of_w(i * kSkinnyWarps + warp) * (p.in / 2) + begin * 32 + 8 * lane;
    }
    const int row = threadIdx.x / kPositionVectors, vector = threadIdx.x % kPositionVectors;
    position = p.positions + row_of_w(row) * (p.in / 8) + (begin + vector) * 8;
    values_left = static_cast<int>(end - begin) * 4 - lane;
    positions_left = row < kRows ? static_cast<int>(end - begin) - vector : 0;
  }

  // Starts to load the next chunk, as one group of copies; beyond the end of the columns an empty group.
  __device__ void load(const SkinnyQueue<kTiles>& queue, int stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (values_left > 0) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        copy_async<16>(queue.values(stage, i * kSkinnyWarps + warp) + lane, value[i]);
        value[i] += 8 * kValueVectors;
      }
    }
    if (positions_left > 0) {
      copy_async<8>(queue.positions(stage, threadIdx.x / kPositionVectors) + threadIdx.x % kPositionVectors,
                    position);
    }
    position += 8 * kPositionVectors;
    values_left -= kValueVectors;
    positions_left -= kPositionVectors;
    commit_copies();
  }
};

// x of the steps of a warp: each kSkinnyWarps-th step of [begin, end).
template <int kTokenTiles>
struct SkinnyTokens {
  const uint16_t* from[kTokenTiles];  // null for a token that is not there
  int left;                           // steps up to the end

  __device__ SkinnyTokens(const SkinnyProblem& p, int64_t begin, int64_t end) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int token = kSkinnyTokens * n + g;
      // of 16 neighbouring columns lane t, t even, reads the first eight, and lane t + 1 the other eight
      from[n] = token < p.tokens ? p.x + token * p.in + (begin + warp) * kSkinnyColumns + 8 * t : nullptr;
    }
    left = static_cast<int>(end - begin) - warp;
  }

  // x of the next step; 0 beyond the end.
  __device__ void load(uint4 (&x)[kTokenTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const bool there = from[n] && left > 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[n][half] = there ? *reinterpret_cast<const uint4*>(from[n] + 32 * half) : uint4{};
      }
      if (there) from[n] += kSkinnyWarps * kSkinnyColumns;
    }
    left -= kSkinnyWarps;
  }
};

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

// The operands of one lane for 32 rows of the rotation. Lane t has rows 8 t … 8 t + 7.
template <int kTiles, int kTokenTiles>
struct RotationStep {
  uint32_t q[8][kTiles];  // columns from 2 kTiles g on, of eight rows; two columns in a word
  uint4 r[kTokenTiles];   // 8 columns of the residual
};

template <int kTiles, int kTokenTiles>
__device__ void load_rotation(const SkinnyProblem& p, int64_t first_row, int64_t first, int lane,
                              RotationStep<kTiles, kTokenTiles>& to) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint16_t* from = p.rotation + (first + 8 * t + i) * p.out + first_row + 2 * kTiles * g;
    if constexpr (kTiles == 2) {
      const uint2 two = __ldcs(reinterpret_cast<const uint2*>(from));
      to.q[i][0] = two.x;
      to.q[i][1] = two.y;
    } else {
      to.q[i][0] = __ldcs(reinterpret_cast<const uint32_t*>(from));
    }
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int token = kSkinnyTokens * n + g;
    to.r[n] = token < p.tokens ? *reinterpret_cast<const uint4*>(p.residual + token * p.out + first + 8 * t)
                               : uint4{};
  }
}

// sum += residual · rotation, over these 32 rows of the rotation, in two products of 16 rows.
template <class E, int kTiles, int kTokenTiles>
__device__ void add_rotation(const RotationStep<kTiles, kTokenTiles>& from,
                             float (&sum)[kTiles][kTokenTiles][4]) {
  const auto lower = [](uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; };
  const auto upper = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t a = from.q[4 * k][tile], b = from.q[4 * k + 1][tile], c = from.q[4 * k + 2][tile],
                     d = from.q[4 * k + 3][tile];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const Words4 r = words(from.r[n]);
        E::multiply_dense(sum[tile][n], {lower(a, b), upper(a, b), lower(c, d), upper(c, d)}, r.at[2 * k],
                          r.at[2 * k + 1]);
      }
    }
  }
}

// sum += the products of the columns of W that this warp has: each kSkinnyWarps-th step of [begin, end).
template <class E, int kTiles, int kTokenTiles>
__device__ void add_weights(const SkinnyProblem& p, const SkinnyQueue<kTiles>& queue, int64_t first_row,
                            int64_t begin, int64_t end, float (&sum)[kTiles][kTokenTiles][4]) {
  constexpr int kStages = SkinnyQueue<kTiles>::kStages;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int steps = static_cast<int>(end - begin);
  SkinnyLoader<kTiles> weights(p, first_row, begin, end);
  SkinnyTokens<kTokenTiles> tokens(p, begin, end);
  for (int i = 0; i < kStages - 1; ++i) weights.load(queue, i);
  SkinnyStep<kTiles, kTokenTiles> now;
  uint4 next[kTokenTiles][2];
  tokens.load(next);
  int stage = 0;
  for (int first = 0; first < steps; first += kSkinnyWarps) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      now.x[n][0] = next[n][0];
      now.x[n][1] = next[n][1];
    }
    tokens.load(next);
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the copies of all threads are there, and nobody reads the chunk before
    weights.load(queue, stage == 0 ? kStages - 1 : stage - 1);  // in the place of the chunk before
    if (first + warp < steps) {
      queue.read(stage, warp, now);
      add_step<E>(now, lane, sum);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// sum += residual · rotation, over the rows of the rotation that this warp of this split has.
template <class E, int kTiles, int kTokenTiles>
__device__ void add_rotations(const SkinnyProblem& p, int64_t first_row, int split,
                              float (&sum)[kTiles][kTokenTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t stride = int64_t(p.splits) * kSkinnyWarps * kRotationColumns;
  int64_t first = (int64_t(split) * kSkinnyWarps + warp) * kRotationColumns;
  if (first >= p.out) return;
  RotationStep<kTiles, kTokenTiles> now, next;
  load_rotation(p, first_row, first, lane, next);
  for (; first < p.out; first += stride) {
    now = next;
    load_rotation(p, first_row, first + stride < p.out ? first + stride : first, lane, next);
    add_rotation<E>(now, sum);
  }
}

// y of a token and a row, from the sum of its products.
template <class E>
__device__ void store_skinny(const SkinnyProblem& p, int64_t token, int64_t row, float y) {
  if (p.bias) y += E::to_float(p.bias[row]);
  if (p.residual && !p.rotation) y += E::to_float(p.residual[token * p.out + row]);
  p.y[token * p.out + row] = E::from_float(y);
}

// E: Bf16Element or Fp16Element. Block (i, j) has the j-th tile of rows and, with i = n · splits + s, the
// n-th tile of tokens and the s-th part of the columns, so that blocks with the same rows of W run at about
// the same time.
template <class E, int kTiles, int kTokenTiles>
__global__ void __launch_bounds__(kSkinnyWarps * 32) sparse24_skinny(SkinnyProblem p) {
  constexpr int kSums = kTiles * kTokenTiles * 4;
  extern __shared__ uint4 dynamic_shared[];
  const int split = static_cast<int>(blockIdx.x) % p.splits;
  const int first_token = static_cast<int>(blockIdx.x) / p.splits * kSkinnyTokens * kTokenTiles;
  float* const partial = p.partial ? p.partial + (int64_t(split) * p.tokens + first_token) * p.out : nullptr;
  p.x += first_token * p.in;
  p.y += first_token * p.out;
  if (p.residual) p.residual += first_token * p.out;
  p.tokens -= first_token;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * 16 * kTiles;
  float sum[kTiles][kTokenTiles][4] = {};

  const int64_t steps = p.in / kSkinnyColumns;
  add_weights<E>(p, SkinnyQueue<kTiles>{dynamic_shared}, first_row, steps * split / p.splits,
                 steps * (split + 1) / p.splits, sum);
  if (p.rotation) add_rotations<E>(p, first_row, split, sum);

  __syncthreads();                                                  // nobody reads the queue any more
  auto* const of_warps = reinterpret_cast<float*>(dynamic_shared);  // [kSkinnyWarps, kSums, 32]
#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_warps[(warp * kSums + (q * kTokenTiles + n) * 4 + i) * 32 + lane] = sum[q][n][i];
      }
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
    for (int w = 0; w < kSkinnyWarps; ++w) y += of_warps[(w * kSums + i) * 32 + of];
    if (partial) {
      partial[token * p.out + row] = y;
    } else {
      store_skinny<E>(p, token, row, y);
    }
  }
}

constexpr int kSkinnySumThreads = 256;

// y from the sums of the splits, which are added in their order. Block (i, j) has kSkinnySumThreads rows,
// from the i-th tile of them on, of token j.
template <class E>
__global__ void __launch_bounds__(kSkinnySumThreads) sparse24_skinny_sum(SkinnyProblem p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSkinnySumThreads + threadIdx.x;
  const int64_t token = blockIdx.y;
  if (row >= p.out) return;
  float y = 0;
  for (int split = 0; split < p.splits; ++split) y += p.partial[(split * p.tokens + token) * p.out + row];
  store_skinny<E>(p, token, row, y);
}

// How many blocks share the columns of the same rows: as many as fill the GPU with one block a
// multiprocessor, while each warp has at least two steps.
constexpr int skinny_splits(int64_t blocks, int64_t steps, int multiprocessors) {
  const int64_t wanted = multiprocessors / blocks, most = steps / (2 * kSkinnyWarps);
  const int64_t splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

// launcher: a Launcher (common/cuda/launcher.cuh). p.out is at most kMostSkinnyRows.
template <class E, class LauncherT>
void run_sparse24_skinny(LauncherT& launcher, SkinnyProblem p) {
  // two tiles of rows per block halve the reads of x; they are used if the blocks still fill the GPU
  const bool two_tiles = p.out / 32 >= launcher.multiprocessors() / 2;
  const auto launch = [&](auto kernel, int tiles, int tokens) {
    const int64_t rows = (p.out + 16 * tiles - 1) / (16 * tiles), groups = (p.tokens + tokens - 1) / tokens;
    p.splits = skinny_splits(rows * groups, p.in / kSkinnyColumns, launcher.multiprocessors());
    if (p.splits > 1) p.partial = launcher.template allocate<float>(p.splits * p.tokens * p.out);
    launcher.launch(kernel, dim3(groups * p.splits, rows), dim3(kSkinnyWarps * 32),
                    skinny_shared_bytes(tiles), p);
  };
  if (p.tokens <= kSkinnyTokens) {
    two_tiles ? launch(&sparse24_skinny<E, 2, 1>, 2, kSkinnyTokens)
              : launch(&sparse24_skinny<E, 1, 1>, 1, kSkinnyTokens);
  } else {
    two_tiles ? launch(&sparse24_skinny<E, 2, 2>, 2, 2 * kSkinnyTokens)
              : launch(&sparse24_skinny<E, 1, 2>, 1, 2 * kSkinnyTokens);
  }
  if (p.splits > 1) {
    const dim3 grid((p.out + kSkinnySumThreads - 1) / kSkinnySumThreads, p.tokens);
    launcher.launch(&sparse24_skinny_sum<E>, grid, dim3(kSkinnySumThreads), /*shared_bytes=*/0, p);
  }
}

}  // namespace drot
