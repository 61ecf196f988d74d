// How a matrix is divided among threads if each thread owns columns and walks down the rows: values that
// belong to a column (its scale, its sums) then stay in registers. Used by entropy_loss_columns.cuh and
// pruned_importance_groups.cuh.
//
// Block (tile, chunk) takes the columns of a tile and the rows of a chunk. Its kWalkWarps warps all have the
// same columns, a few neighbouring columns to a thread, and take turns at the rows. A warp loads a few rows
// at once, to hide the latency of the loads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace drot {

constexpr int kWalkWarps = 8;
constexpr int kWalkThreads = 32 * kWalkWarps;

// The elements that one thread works on.
struct ColumnWalk {
  int64_t tile;   // first column of the block
  int64_t start;  // first column of the thread
  int64_t first;  // first row of the warp
  int64_t last;   // one past the last row of the chunk

  // Args:
  //   width: columns of a tile.
  //   each: columns of a thread.
  //   rows: rows of the matrix.
  //   chunk: rows of a chunk.
  //   at_once: rows that a warp loads at once.
  __device__ ColumnWalk(int width, int each, int64_t rows, int64_t chunk, int at_once)
      : tile(static_cast<int64_t>(blockIdx.x) * width),
        start(tile + static_cast<int64_t>(threadIdx.x % 32) * each),
        first(blockIdx.y * chunk + static_cast<int64_t>(threadIdx.x / 32) * at_once),
        last((blockIdx.y + 1) * chunk < rows ? (blockIdx.y + 1) * chunk : rows) {}
};

// The grid is [tiles, chunks]. Every chunk has at least one row, and at most `chunk`.
struct ColumnGrid {
  int64_t tiles, chunk, chunks;

  // Args:
  //   rows, columns: the size of the matrix.
  //   width: columns of a tile.
  //   at_once: rows that a warp loads at once.
  //   resident: blocks that the GPU runs at the same time; the grid has about as many.
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
