// How a matrix is divided where a thread owns columns and walks down the rows, so that what belongs to a
// column (its factor, its sums) stays in registers.
//
// Block (tile, chunk) has kWalkWarps warps on the same columns, a few neighbours a thread; they share out the
// rows of the chunk, a few at a time, which are on their way together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace drot {

constexpr int kWalkWarps = 8;
constexpr int kWalkThreads = 32 * kWalkWarps;

// Of one thread.
struct ColumnWalk {
  int64_t tile;   // first column of the block
  int64_t start;  // first column of the thread
  int64_t first;  // row of the warp
  int64_t last;   // row, one past the chunk's

  // width: columns of a tile; each: columns of a thread.
  __device__ ColumnWalk(int width, int each, int64_t rows, int64_t chunk, int at_once)
      : tile(static_cast<int64_t>(blockIdx.x) * width),
        start(tile + static_cast<int64_t>(threadIdx.x % 32) * each),
        first(blockIdx.y * chunk + static_cast<int64_t>(threadIdx.x / 32) * at_once),
        last((blockIdx.y + 1) * chunk < rows ? (blockIdx.y + 1) * chunk : rows) {}
};

// The grid, and the rows of a chunk; every chunk has at least one row.
struct ColumnGrid {
  int64_t tiles, chunk, chunks;

  // For tiles of `width` columns and as many blocks as the GPU runs at once, `resident`.
  ColumnGrid(int64_t rows, int64_t columns, int width, int at_once, int64_t resident) {
    const int64_t height = kWalkWarps * at_once;
    tiles = (columns + width - 1) / width;
    const int64_t wanted = std::clamp<int64_t>(resident / tiles, 1, 65535);
    const int64_t share = (rows + wanted - 1) / wanted;
    chunk = (share + height - 1) / height * height;
    chunks = (rows + chunk - 1) / chunk;
  }
};

}  // namespace drot
