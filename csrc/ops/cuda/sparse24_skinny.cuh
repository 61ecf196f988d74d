// The skinny kernel of sparse24_linear: y = x Wᵀ (+ bias) (+ residual, or + residual · rotation) for few
// tokens, by sparse tensor-core products (mma.sp) with W as the sparse operand. Used by sparse24_linear.cu.
//
// The packed weight is multiplied as it is: its values are operand A of mma.sp, its positions the metadata
// (the tables in sparse24_mma.cuh). Each value of W is read once, by one block, if the block has all tokens.
//
// A product with few tokens waits for W. A block has a queue of chunks of W and of x in shared memory, of
// which all but one are on their way while it multiplies: bytes_in_flight says how many bytes of W. A
// chunk has one step of 64 columns for each of the warps that share the columns; the sums of these warps are
// added in a fixed order through shared memory. Where the blocks are too few for the GPU, several share the
// columns of the same rows (split-K), and a second kernel adds their sums in a fixed order.
//
// The transposed rotation is multiplied in the same way, as a dense matrix, whose chunks follow those of W in
// the queue: a step has 32 of its columns, which are as many bytes as the values of 64 columns of W.
//
// What an H200 showed, with a weight of 4096 x 14336 and one token: 35 us where each warp loaded 64 bytes of
// eight rows and waited for x in each step; 20.8 us with a queue of whole rows; 20.4 us with operands by
// ldmatrix, which take 70 instructions a step in place of 168; cuBLAS 31 us with the dense weight. ldmatrix
// brought 16 tokens from 30 to 27 us, and 64 tokens from 56 to 40 us.
#pragma once

#include <cstdint>

#include "common/cuda/expert_rows.cuh"

namespace drot {

constexpr int kSkinnyWarps = 8;
constexpr int kSkinnyThreads = 32 * kSkinnyWarps;
constexpr int kSkinnyTokens = 8;                          // tokens that one mma instruction multiplies
constexpr int kSkinnyColumns = 64;                        // columns of W in one step of a warp
constexpr int kRotationColumns = 32;                      // columns of the rotation in one step of a warp
constexpr int64_t kMostSkinnyRows = int64_t(65535) * 32;  // a grid has 65,535 blocks of at least 32 rows

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
  // Where several blocks share the columns of the same rows: how many, and the steps that each takes of W and
  // of the rotation.
  int splits = 1, steps = 0, rotation_steps = 0;
  float* partial = nullptr;  // [splits, tokens, out]; null for one split
};

// The products of the experts of a mixture, sparse24_experts. `tokens` is not used: a block has those of
// `of_experts`. values, positions and bias: those of all experts, one after the other. Nothing else is added,
// and no columns are shared.
struct SkinnyExperts : SkinnyProblem {
  ExpertRows of_experts;
};

// What a block multiplies. A warp has 16 · Tiles rows of W and all tokens of the block, up to 8 · TokenTiles;
// RowWarps warps have different rows, and the others different columns of the same rows.
//
// Rows in shared memory are a vector longer than what they hold, so that the eight rows that ldmatrix reads
// at once lie in different banks.
template <int Tiles, int TokenTiles, int RowWarps, int Stages>
struct SkinnyBlock {
  static constexpr int kTiles = Tiles, kTokenTiles = TokenTiles, kRowWarps = RowWarps;
  static constexpr int kStages = Stages;  // chunks in the queue
  static constexpr int kColumnWarps = kSkinnyWarps / kRowWarps;
  static constexpr int kRows = 16 * kTiles * kRowWarps, kTokens = kSkinnyTokens * kTokenTiles;
  static constexpr int kSums = 4 * kTiles * kTokenTiles;  // of a thread
  // of a row of a chunk: its values in vectors of 16 bytes, its positions in vectors of 8; of a token: x
  static constexpr int kValueVectors = 4 * kColumnWarps, kValuePitch = kValueVectors + 1;
  static constexpr int kPositionVectors = kColumnWarps, kPositionPitch = kPositionVectors + 1;
  static constexpr int kTokenVectors = 8 * kColumnWarps, kTokenPitch = kTokenVectors + 1;
  // where they begin in a chunk, in bytes
  static constexpr int kPositionsAt = 16 * kRows * kValuePitch;
  static constexpr int kTokensAt = kPositionsAt + 8 * kRows * kPositionPitch;

  // Bytes of a chunk with x of `tokens` tokens.
  static constexpr int chunk_bytes(int tokens) { return kTokensAt + 16 * kTokenPitch * tokens; }

  // Bytes of the queue of a block with `tokens` tokens. The sums of the warps take its place in the end.
  static constexpr int64_t shared_bytes(int tokens) {
    const int64_t queue = int64_t(kStages) * chunk_bytes(tokens), sums = 4 * kSums * kSkinnyThreads;
    return queue > sums ? queue : sums;
  }

  // Bytes of W that are on their way to a block while it multiplies. A row has 64 bytes of values and 8 of
  // positions in a step.
  static constexpr int64_t bytes_in_flight() {
    return int64_t(kStages - 1) * kRows * kColumnWarps * (64 + 8);
  }
};

// For up to 4, 16, 32 and 64 tokens those that were fastest on an H200, of 132 multiprocessors, among the 27
// of benchmarks/gpu/skinny_blocks.py. More rows a block read x fewer times, and more chunks in the queue keep
// more of W on its way. With 8 tokens Skinny4 was 4 % faster than Skinny16, and needs more shared memory than
// GPUs for consumers have.
using Skinny4 = SkinnyBlock<2, 1, 1, 4>;
using Skinny16 = SkinnyBlock<2, 2, 4, 3>;
using Skinny32 = SkinnyBlock<2, 4, 4, 3>;
using Skinny64 = SkinnyBlock<2, 8, 4, 3>;

// A matrix of which a block multiplies the steps [begin, end) of its columns: W, or the transposed rotation.
template <bool Dense>
struct SkinnyMatrix {
  static constexpr bool kDense = Dense;
  static constexpr int kTokenVectors = kDense ? 4 : 8;  // of x, in a step
  const uint16_t* values;                               // [rows, width]
  const uint8_t* positions;                             // [rows, width / 4]; not read if kDense
  const uint16_t* x;                                    // [tokens, width], or [tokens, 2 width]
  int64_t width;
  int64_t begin, end;
};

// What a thread loads of each chunk of a matrix: a vector of values of every n-th row, the positions of a
// step of every n-th row, and a vector of x of every n-th token.
template <class B, class M>
struct SkinnyLoader {
  static constexpr int kTokenVectors = M::kTokenVectors * B::kColumnWarps;  // of a token in a chunk
  // rows that all threads load at once, and how many such groups of rows there are
  static constexpr int kValueRows = kSkinnyThreads / B::kValueVectors, kValues = B::kRows / kValueRows;
  static constexpr int kPositionRows = kSkinnyThreads / B::kPositionVectors;
  static constexpr int kPositions = M::kDense ? 0 : (B::kRows + kPositionRows - 1) / kPositionRows;
  static constexpr int kTokenRows = kSkinnyThreads / kTokenVectors;
  static constexpr int kTokens = (B::kTokens + kTokenRows - 1) / kTokenRows;
  static_assert(B::kRows % kValueRows == 0 && (B::kRows % kPositionRows == 0 || kPositions <= 1));

  const uint16_t* values[kValues];
  const uint8_t* positions[kPositions + 1];
  const uint16_t* x[kTokens];
  SharedAddress values_to, positions_to, x_to;  // in the first chunk
  int tokens, left;                             // steps up to the end of the columns

  // Rows beyond the last are loaded from the last; their results are not stored.
  __device__ SkinnyLoader(const M& m, SharedAddress shared, int tokens, int64_t rows, int64_t first_row)
      : tokens(tokens), left(static_cast<int>(m.end - m.begin)) {
    const int thread = static_cast<int>(threadIdx.x);
    const auto row_of = [&](int row) { return first_row + row < rows ? first_row + row : rows - 1; };
    const int value_row = thread / B::kValueVectors, value = thread % B::kValueVectors;
    values_to = shared + 16 * (value_row * B::kValuePitch + value);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = m.values + row_of(value_row + i * kValueRows) * m.width + m.begin * 32 + 8 * value;
    }
    const int position_row = thread / B::kPositionVectors, position = thread % B::kPositionVectors;
    positions_to = shared + B::kPositionsAt + 8 * (position_row * B::kPositionPitch + position);
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      positions[i] =
          m.positions + row_of(position_row + i * kPositionRows) * (m.width / 4) + (m.begin + position) * 8;
    }
    const int token = thread / kTokenVectors, vector = thread % kTokenVectors;
    const int64_t x_width = M::kDense ? m.width : 2 * m.width;
    x_to = shared + B::kTokensAt + 16 * (token * B::kTokenPitch + vector);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      x[i] = m.x + (token + i * kTokenRows) * x_width + m.begin * 8 * M::kTokenVectors + 8 * vector;
    }
  }

  // Starts to load the next chunk, `at` bytes into the queue, as one group of copies; beyond the end of the
  // columns an empty group.
  __device__ void load(int at) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread % B::kValueVectors / 4 < left) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        copy_async<16>(values_to + at + 16 * i * kValueRows * B::kValuePitch, values[i]);
        values[i] += 8 * B::kValueVectors;
      }
    }
    if (thread % B::kPositionVectors < left && thread / B::kPositionVectors < B::kRows) {
#pragma unroll
      for (int i = 0; i < kPositions; ++i) {
        copy_async<8>(positions_to + at + 8 * i * kPositionRows * B::kPositionPitch, positions[i]);
        positions[i] += 8 * B::kPositionVectors;
      }
    }
    if (thread % kTokenVectors / M::kTokenVectors < left) {
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (thread / kTokenVectors + i * kTokenRows < tokens) {
          copy_async<16>(x_to + at + 16 * i * kTokenRows * B::kTokenPitch, x[i]);
        }
        x[i] += 8 * kTokenVectors;
      }
    }
    left -= B::kColumnWarps;
    commit_copies();
  }
};

// Where a warp reads its step of the first chunk: the addresses that this lane gives to load_matrices.
template <class B>
struct SkinnyReader {
  SharedAddress values;  // of the first tile of rows: matrices of rows 0 … 7 and 8 … 15, then the next vector
  SharedAddress positions;
  SharedAddress x[B::kTokenTiles];  // matrices of eight tokens, of four neighbouring vectors

  // Tokens beyond the last are read from the last; their results are not stored.
  __device__ SkinnyReader(SharedAddress shared, int tokens, int token_vectors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = warp / B::kColumnWarps * 16 * B::kTiles, step = warp % B::kColumnWarps;
    values = shared + 16 * ((first_row + lane % 16) * B::kValuePitch + 4 * step + lane / 16);
    positions =
        shared + B::kPositionsAt + 8 * ((first_row + lane / 4) * B::kPositionPitch + step) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < B::kTokenTiles; ++n) {
      const int token = kSkinnyTokens * n + lane % 8;
      x[n] = shared + B::kTokensAt +
             16 * ((token < tokens ? token : tokens - 1) * B::kTokenPitch + token_vectors * step + lane / 8);
    }
  }
};

// sum += the product of the warp's step of a matrix in the chunk that is `at` bytes into the queue: two
// products of 32 columns of W, or of 16 of the rotation.
template <class E, bool kDense, class B>
__device__ void add_step(const SkinnyReader<B>& from, int at, float (&sum)[B::kTiles][B::kTokenTiles][4]) {
  uint32_t w[B::kTiles][2][4], metadata[B::kTiles];
#pragma unroll
  for (int q = 0; q < B::kTiles; ++q) {
    const SharedAddress values = from.values + at + 16 * 16 * q * B::kValuePitch;
    load_matrices(w[q][0], values);
    load_matrices(w[q][1], values + 32);
    if constexpr (!kDense) {
      const SharedAddress positions = from.positions + at + 8 * 16 * q * B::kPositionPitch;
      metadata[q] = load_shared(positions) |
                    static_cast<uint32_t>(load_shared(positions + 8 * 8 * B::kPositionPitch)) << 16;
    }
  }
#pragma unroll
  for (int n = 0; n < B::kTokenTiles; ++n) {
    uint32_t x[2][4];
    load_matrices(x[0], from.x[n] + at);
    if constexpr (!kDense) load_matrices(x[1], from.x[n] + at + 64);
#pragma unroll
    for (int q = 0; q < B::kTiles; ++q) {
      if constexpr (kDense) {
        E::multiply_dense(sum[q][n], w[q][0], x[0][0], x[0][1]);
        E::multiply_dense(sum[q][n], w[q][1], x[0][2], x[0][3]);
      } else {
        E::template multiply_sparse<0>(sum[q][n], w[q][0], x[0], metadata[q]);
        E::template multiply_sparse<1>(sum[q][n], w[q][1], x[1], metadata[q]);
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

// E: Bf16Element or Fp16Element. The tokens from first_token on, the rows of W of blockIdx.y and the part of
// the columns of blockIdx.z.
template <class E, class B>
__device__ __forceinline__ void multiply_skinny(const SkinnyProblem& p, int64_t first_token, int tokens) {
  extern __shared__ uint4 dynamic_shared[];
  const SharedAddress shared = shared_address(dynamic_shared);
  const int split = static_cast<int>(blockIdx.z);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * B::kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto part = [&](auto& matrix, int64_t steps, int each) {  // may be empty
    const int64_t begin = static_cast<int64_t>(split) * each, end = begin + each;
    matrix.begin = begin < steps ? begin : steps;
    matrix.end = end < steps ? end : steps;
  };
  SkinnyMatrix<false> weight{
      .values = p.values, .positions = p.positions, .x = p.x + first_token * p.in, .width = p.in / 2};
  part(weight, p.in / kSkinnyColumns, p.steps);

  constexpr int kAhead = B::kStages - 1;  // chunks on their way
  const int chunk_bytes = B::chunk_bytes(tokens), queue_bytes = B::kStages * chunk_bytes;
  int at = 0, before = queue_bytes - chunk_bytes;  // of the chunk that is multiplied, and of the one before
  // Takes `chunks` chunks from the queue, while `loader` puts as many there; left: steps in those and later
  const auto multiply = [&](int chunks, int left, auto& loader, const auto& add) {
    for (; chunks > 0; --chunks, left -= B::kColumnWarps) {
      wait_for_copies<kAhead - 1>();
      __syncthreads();  // the copies of all threads are there, and nobody reads the chunk before
      loader.load(before);
      if (warp % B::kColumnWarps < left) add(at);
      before = at;
      at = at + chunk_bytes == queue_bytes ? 0 : at + chunk_bytes;
    }
  };
  const auto chunks_of = [](int steps) { return (steps + B::kColumnWarps - 1) / B::kColumnWarps; };

  float sum[B::kTiles][B::kTokenTiles][4] = {};
  const SkinnyReader<B> reader(shared, tokens, SkinnyMatrix<false>::kTokenVectors);
  const auto add_weight = [&](int at) { add_step<E, false>(reader, at, sum); };
  SkinnyLoader<B, SkinnyMatrix<false>> loader(weight, shared, tokens, p.out, first_row);
  const int steps = static_cast<int>(weight.end - weight.begin), chunks = chunks_of(steps);
  if (!p.rotation) {
    for (int i = 0; i < kAhead; ++i) loader.load(i * chunk_bytes);
    multiply(chunks, steps, loader, add_weight);
  } else {
    SkinnyMatrix<true> rotation{
        .values = p.rotation, .positions = nullptr, .x = p.residual + first_token * p.out, .width = p.out};
    part(rotation, p.out / kRotationColumns, p.rotation_steps);
    const int first = chunks < kAhead ? chunks : kAhead;  // chunks of W in the queue when its last is loaded
    for (int i = 0; i < first; ++i) loader.load(i * chunk_bytes);
    SkinnyLoader<B, SkinnyMatrix<true>> next(rotation, shared, tokens, p.out, first_row);
    for (int i = first; i < kAhead; ++i) next.load(i * chunk_bytes);
    multiply(chunks - first, steps, loader, add_weight);
    multiply(first, steps - (chunks - first) * B::kColumnWarps, next, add_weight);
    const SkinnyReader<B> reader(shared, tokens, SkinnyMatrix<true>::kTokenVectors);
    const int more = static_cast<int>(rotation.end - rotation.begin);
    multiply(chunks_of(more), more, next, [&](int at) { add_step<E, true>(reader, at, sum); });
  }

  __syncthreads();                                                  // nobody reads the queue any more
  auto* const of_warps = reinterpret_cast<float*>(dynamic_shared);  // [kSkinnyWarps, kSums, 32]
#pragma unroll
  for (int q = 0; q < B::kTiles; ++q) {
#pragma unroll
    for (int n = 0; n < B::kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_warps[(warp * B::kSums + (q * B::kTokenTiles + n) * 4 + i) * 32 + lane] = sum[q][n][i];
      }
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < B::kRows * tokens; at += kSkinnyThreads) {
    const int row = at % B::kRows, token = at / B::kRows;
    if (first_row + row >= p.out) continue;
    const int first = row / (16 * B::kTiles) * B::kColumnWarps;  // of the warps with this row
    const int q = row / 16 % B::kTiles, n = token / 8, i = row / 8 % 2 * 2 + token % 2;
    const int in_warp = ((q * B::kTokenTiles + n) * 4 + i) * 32 + row % 8 * 4 + token % 8 / 2;
    float y = 0;
#pragma unroll
    for (int w = 0; w < B::kColumnWarps; ++w) y += of_warps[(first + w) * B::kSums * 32 + in_warp];
    if (p.partial) {
      p.partial[(split * int64_t(p.tokens) + first_token + token) * p.out + first_row + row] = y;
    } else {
      store_skinny<E>(p, first_token + token, first_row + row, y);
    }
  }
}

// Block (n, j, s) has the n-th group of tokens, the j-th tile of rows and the s-th part of the columns, so
// that blocks that read the same of W run at about the same time.
template <class E, class B>
__global__ void __launch_bounds__(kSkinnyThreads) sparse24_skinny(SkinnyProblem p) {
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * B::kTokens;
  const int64_t tokens_left = p.tokens - first_token;
  multiply_skinny<E, B>(p, first_token,
                        tokens_left < B::kTokens ? static_cast<int>(tokens_left) : B::kTokens);
}

// Block (n, j) has the j-th tile of rows of the expert whose tokens begin at the n-th place, and at most
// kTokens of these.
template <class E, class B, int kTokens>
__global__ void __launch_bounds__(kSkinnyThreads) sparse24_skinny_experts(SkinnyExperts p) {
  const ExpertTile tile = expert_tile<kTokens, kSkinnyThreads>(p.of_experts, blockIdx.x);
  if (tile.first >= tile.stop) return;
  p.values += tile.expert * p.out * (p.in / 2);
  p.positions += tile.expert * p.out * (p.in / 8);
  if (p.bias) p.bias += tile.expert * p.out;
  multiply_skinny<E, B>(p, tile.first, static_cast<int>(tile.stop - tile.first));
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
constexpr int skinny_splits(int64_t blocks, int64_t steps, int column_warps, int multiprocessors) {
  const int64_t wanted = multiprocessors / blocks, most = steps / (2 * column_warps);
  const int64_t splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

template <class E, class B, class LauncherT>
void run_sparse24_skinny_block(LauncherT& launcher, SkinnyProblem p) {
  const int64_t rows = (p.out + B::kRows - 1) / B::kRows, groups = (p.tokens + B::kTokens - 1) / B::kTokens;
  const int64_t steps = p.in / kSkinnyColumns, rotation_steps = p.rotation ? p.out / kRotationColumns : 0;
  p.splits = skinny_splits(rows * groups, steps, B::kColumnWarps, launcher.multiprocessors());
  p.steps = static_cast<int>((steps + p.splits - 1) / p.splits);
  p.rotation_steps = static_cast<int>((rotation_steps + p.splits - 1) / p.splits);
  if (p.splits > 1) p.partial = launcher.template allocate<float>(p.splits * p.tokens * p.out);
  launcher.launch(&sparse24_skinny<E, B>, dim3(groups, rows, p.splits), dim3(kSkinnyThreads),
                  B::shared_bytes(p.tokens < B::kTokens ? p.tokens : B::kTokens), p);
  if (p.splits > 1) {
    const dim3 grid((p.out + kSkinnySumThreads - 1) / kSkinnySumThreads, p.tokens);
    launcher.launch(&sparse24_skinny_sum<E>, grid, dim3(kSkinnySumThreads), /*shared_bytes=*/0, p);
  }
}

// launcher: a Launcher (common/cuda/launcher.cuh). p.out is at most kMostSkinnyRows.
template <class E, class LauncherT>
void run_sparse24_skinny(LauncherT& launcher, SkinnyProblem p) {
  if (p.tokens <= 4) return run_sparse24_skinny_block<E, Skinny4>(launcher, p);
  if (p.tokens <= Skinny16::kTokens) return run_sparse24_skinny_block<E, Skinny16>(launcher, p);
  // a GPU for consumers has too little shared memory for more than 32 tokens; it reads W several times
  const bool fits = Skinny64::shared_bytes(Skinny64::kTokens) <= launcher.shared_memory();
  if (p.tokens <= Skinny32::kTokens || !fits) return run_sparse24_skinny_block<E, Skinny32>(launcher, p);
  run_sparse24_skinny_block<E, Skinny64>(launcher, p);
}

template <class E, class B, int kTokens = B::kTokens, class LauncherT>
void run_sparse24_skinny_experts_block(LauncherT& launcher, SkinnyExperts p) {
  p.steps = static_cast<int>(p.in / kSkinnyColumns);
  const dim3 grid(expert_places(p.of_experts, kTokens), (p.out + B::kRows - 1) / B::kRows);
  launcher.launch(&sparse24_skinny_experts<E, B, kTokens>, grid, dim3(kSkinnyThreads),
                  B::shared_bytes(kTokens), p);
}

// By the mean of the tokens of an expert that has some, if all experts are as likely. p.out is at most
// kMostSkinnyRows.
template <class E, class LauncherT>
void run_sparse24_skinny_experts(LauncherT& launcher, const SkinnyExperts& p) {
  const int64_t rows = p.of_experts.rows, experts = p.of_experts.experts;
  const int64_t mean = rows / (rows < experts ? rows : experts);
  if (mean <= 2) return run_sparse24_skinny_experts_block<E, Skinny4, /*kTokens=*/4>(launcher, p);
  const bool fits = Skinny64::shared_bytes(Skinny64::kTokens) <= launcher.shared_memory();
  if (mean <= Skinny16::kTokens || !fits) return run_sparse24_skinny_experts_block<E, Skinny16>(launcher, p);
  run_sparse24_skinny_experts_block<E, Skinny64>(launcher, p);
}

}  // namespace drot
