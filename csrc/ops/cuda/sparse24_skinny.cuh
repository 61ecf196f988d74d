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
// step of 64 columns for each warp. It is loaded row by row: a warp reads 512 neighbouring bytes at once. x
// is loaded some steps ahead, in registers. Before, each warp loaded 64 bytes of eight rows, and waited for x
// in each step: with 1 token and a weight of 4096 x 14336, an H200 read 1.9 of its 4.8 TB/s. Where the blocks
// are too few for the GPU, several share the columns of the same rows (split-K), and a second kernel adds
// their sums in a fixed order.
//
// The transposed rotation is multiplied in the same way, as a dense matrix: a step has 32 of its columns,
// which are as many bytes as the values of 64 columns of W.
//
// The rows of W are permuted too: row g of tile q is row 2 kTiles g + 2 q of W, and row g + 8 is the next
// row. A lane's rows of W are then neighbours.
#pragma once

#include <cstdint>

namespace drot {

constexpr int kSkinnyWarps = 8;
constexpr int kSkinnyTokens = 8;                          // tokens that one mma instruction multiplies
constexpr int kSkinnyColumns = 64;                        // columns of W in one step of a warp
constexpr int kRotationColumns = 32;                      // columns of the rotation in one step of a warp
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
  const uint16_t* rotation;  // [out, out], transposed
  uint16_t* y;               // [tokens, out]
  int64_t in, out;
  int tokens;
  int splits = 1;            // blocks that share the columns of the same rows
  float* partial = nullptr;  // [splits, tokens, out]; null for one split
};

// Chunks in the queue of a block.
constexpr int kSkinnyStages = 5;

// A row of a chunk in shared memory: its values in vectors of 16 bytes, and its positions in vectors of 8.
// Each row is a little longer than what it holds, so that the lanes that read at once read different banks.
constexpr int kStepValues = 32;  // of a row in a step
constexpr int kValueVectors = kSkinnyWarps * kStepValues / 8, kPositionVectors = kSkinnyWarps;
constexpr int value_pitch(int tiles) { return kValueVectors + (tiles == 2 ? 1 : 2); }
constexpr int kPositionPitch = kPositionVectors + 1;

// Vectors of 16 bytes in a chunk.
constexpr int skinny_chunk(int tiles) { return 16 * tiles * value_pitch(tiles) + 8 * tiles * kPositionPitch; }

// Bytes of the queue of a block.
constexpr int64_t skinny_shared_bytes(int tiles) { return int64_t(kSkinnyStages) * skinny_chunk(tiles) * 16; }

// the sums of the warps take the place of the queue, for two tiles of tokens at most
static_assert(kSkinnyWarps * 32 * 2 * 4 * 4 <= skinny_shared_bytes(1) &&
              kSkinnyWarps * 32 * 2 * 2 * 4 * 4 <= skinny_shared_bytes(2));

// Bytes of W that are on their way to a block while it multiplies. A row has 64 bytes of values and 8 of
// positions in a step.
constexpr int64_t skinny_bytes_in_flight(int tiles) {
  return int64_t(kSkinnyStages - 1) * kSkinnyWarps * 16 * tiles * (64 + 8);
}

struct Words4 {
  uint32_t at[4];
};

template <class Vector>
__device__ Words4 words(const Vector& v) {
  return {v.x, v.y, v.z, v.w};
}

// The queue of the weights of a block.
template <int kTiles>
struct SkinnyQueue {
  static constexpr int kRows = 16 * kTiles;
  uint4* shared;  // kSkinnyStages chunks: the values of all rows, then their positions

  __device__ uint4* values(int stage, int row) const {
    return shared + stage * skinny_chunk(kTiles) + row * value_pitch(kTiles);
  }
  __device__ uint2* positions(int stage, int row) const {
    return reinterpret_cast<uint2*>(values(stage, kRows)) + row * kPositionPitch;
  }
};

// What a thread loads of each chunk of a matrix: in a warp the values of every kSkinnyWarps-th row, one
// vector a lane, and eight threads the positions of a row.
template <int kTiles>
struct SkinnyLoader {
  static constexpr int kRows = 16 * kTiles, kEach = kRows / kSkinnyWarps;
  static_assert(kValueVectors == 32 && kRows * kPositionVectors <= kSkinnyWarps * 32);
  const uint16_t* value[kEach];
  const uint8_t* position;
  int values_left, positions_left;  // vectors up to the end of the columns, from those of this thread on

  // The steps [begin, end) of the rows from first_row on.
  // values: [rows, width]. positions: [rows, width / 4], or null for a dense matrix.
  __device__ SkinnyLoader(const uint16_t* values, const uint8_t* positions, int64_t rows, int64_t width,
                          int64_t first_row, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto row_of = [&](int row) {  // results of rows beyond are not stored
      return first_row + row < rows ? first_row + row : rows - 1;
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      value[i] = values + row_of(i * kSkinnyWarps + warp) * width + begin * kStepValues + 8 * lane;
    }
    const int row = threadIdx.x / kPositionVectors, vector = threadIdx.x % kPositionVectors;
    position = positions + row_of(row) * (width / 4) + (begin + vector) * 8;
    values_left = static_cast<int>(end - begin) * 4 - lane;
    positions_left = positions && row < kRows ? static_cast<int>(end - begin) - vector : 0;
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

// x of the steps of a warp: each kSkinnyWarps-th step of [begin, end), of 32 kVectors columns. A lane has
// eight columns of each 32 and of each tile of tokens.
template <int kTokenTiles, int kVectors>
struct SkinnyTokens {
  using Step = uint4[kTokenTiles][kVectors];
  const uint16_t* from[kTokenTiles];  // null for a token that is not there
  int left;                           // steps up to the end

  // x: [tokens, width].
  __device__ SkinnyTokens(const uint16_t* x, int tokens, int64_t width, int64_t begin, int64_t end) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int token = kSkinnyTokens * n + g;
      from[n] = token < tokens ? x + token * width + (begin + warp) * 32 * kVectors + 8 * t : nullptr;
    }
    left = static_cast<int>(end - begin) - warp;
  }

  // x of the next step; 0 beyond the end.
  __device__ void load(Step& x) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const bool there = from[n] && left > 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        x[n][v] = there ? *reinterpret_cast<const uint4*>(from[n] + 32 * v) : uint4{};
      }
      if (there) from[n] += kSkinnyWarps * 32 * kVectors;
    }
    left -= kSkinnyWarps;
  }
};

// Calls multiply(stage, x) for each of the steps that this warp has of [begin, end).
template <int kTiles, int kTokenTiles, int kVectors, class Multiply>
__device__ void for_each_step(const SkinnyQueue<kTiles>& queue, SkinnyLoader<kTiles> matrix,
                              SkinnyTokens<kTokenTiles, kVectors> tokens, int64_t begin, int64_t end,
                              const Multiply& multiply) {
  // x is loaded so many steps ahead. The loop is unrolled so that no register moves: a move would wait for x
  constexpr int kAhead = kTokenTiles == 1 ? 3 : 1, kUnrolled = kAhead + 1;
  const int steps = static_cast<int>(end - begin), warp = threadIdx.x / 32;
  __syncthreads();  // nobody reads what was in the queue before
  for (int i = 0; i < kSkinnyStages - 1; ++i) matrix.load(queue, i);
  typename SkinnyTokens<kTokenTiles, kVectors>::Step x[kUnrolled];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) tokens.load(x[i]);
  int stage = 0;
  for (int first = 0; first < steps;) {
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      if (first >= steps) break;
      tokens.load(x[(i + kAhead) % kUnrolled]);
      wait_for_copies<kSkinnyStages - 2>();
      __syncthreads();  // the copies of all threads are there, and nobody reads the chunk before
      matrix.load(queue, stage == 0 ? kSkinnyStages - 1 : stage - 1);  // in the place of the chunk before
      if (first + warp < steps) multiply(stage, x[i]);
      stage = stage + 1 == kSkinnyStages ? 0 : stage + 1;
      first += kSkinnyWarps;
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

// sum += the product of one step of W in the queue.
template <class E, int kTiles, int kTokenTiles>
__device__ void add_step(const SkinnyQueue<kTiles>& queue, int stage, const uint4 (&from)[kTokenTiles][2],
                         float (&sum)[kTiles][kTokenTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Words4 x[kTokenTiles][2];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    x[n][0] = halves_of_groups(from[n][0], t);
    x[n][1] = halves_of_groups(from[n][1], t);
  }
#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
    const int row = 2 * kTiles * g + 2 * q;
    const Words4 low = words(queue.values(stage, row)[4 * warp + t]),
                 high = words(queue.values(stage, row + 1)[4 * warp + t]);
    const uint32_t meta = metadata(queue.positions(stage, row)[warp], t) |
                          metadata(queue.positions(stage, row + 1)[warp], t) << 16;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      E::template multiply_sparse<0>(sum[q][n], {low.at[0], high.at[0], low.at[1], high.at[1]},
                                     {x[n][0].at[0], x[n][1].at[0], x[n][0].at[1], x[n][1].at[1]}, meta);
      E::template multiply_sparse<1>(sum[q][n], {low.at[2], high.at[2], low.at[3], high.at[3]},
                                     {x[n][0].at[2], x[n][1].at[2], x[n][0].at[3], x[n][1].at[3]}, meta);
    }
  }
}

// sum += the product of one step of the transposed rotation in the queue: 32 columns, of which lane t has
// eight neighbours, as it has of the residual; two products of 16.
template <class E, int kTiles, int kTokenTiles>
__device__ void add_rotation(const SkinnyQueue<kTiles>& queue, int stage, const uint4 (&from)[kTokenTiles][1],
                             float (&sum)[kTiles][kTokenTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
    const int row = 2 * kTiles * g + 2 * q;
    const Words4 low = words(queue.values(stage, row)[4 * warp + t]),
                 high = words(queue.values(stage, row + 1)[4 * warp + t]);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const Words4 r = words(from[n][0]);
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        E::multiply_dense(sum[q][n], {low.at[k], high.at[k], low.at[k + 1], high.at[k + 1]}, r.at[k],
                          r.at[k + 1]);
      }
    }
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

  const SkinnyQueue<kTiles> queue{dynamic_shared};
  const int64_t steps = p.in / kSkinnyColumns, begin = steps * split / p.splits,
                end = steps * (split + 1) / p.splits;
  for_each_step(queue, SkinnyLoader<kTiles>(p.values, p.positions, p.out, p.in / 2, first_row, begin, end),
                SkinnyTokens<kTokenTiles, 2>(p.x, p.tokens, p.in, begin, end), begin, end,
                [&](int stage, const auto& x) { add_step<E>(queue, stage, x, sum); });
  if (p.rotation) {
    const int64_t steps = p.out / kRotationColumns, begin = steps * split / p.splits,
                  end = steps * (split + 1) / p.splits;
    for_each_step(queue, SkinnyLoader<kTiles>(p.rotation, nullptr, p.out, p.out, first_row, begin, end),
                  SkinnyTokens<kTokenTiles, 1>(p.residual, p.tokens, p.out, begin, end), begin, end,
                  [&](int stage, const auto& r) { add_rotation<E>(queue, stage, r, sum); });
  }

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
  // Two tiles of rows a block halve the reads of x. For few tokens, which read little of x, they are used if
  // two blocks a multiprocessor remain: one multiplies while the other waits at its barrier.
  const int64_t least =
      p.tokens <= kSkinnyTokens ? 2 * launcher.multiprocessors() : launcher.multiprocessors() / 2;
  const bool two_tiles = p.out / 32 >= least;
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
