// How a stack of matrices is divided among blocks if each element is read and written once. Used by the
// kernels of column_scale_backward and turn_start.
#pragma once

#include <cstdint>

namespace drot {

constexpr int kStackThreads = 256, kStackColumns = 128, kStackRows = 64;

// Blocks of kStackThreads threads for `count` matrices [rows, columns].
inline int64_t stack_tiles(int64_t count, int64_t rows, int64_t columns) {
  return count * ((rows + kStackRows - 1) / kStackRows) * ((columns + kStackColumns - 1) / kStackColumns);
}

// The elements of one thread: kVec neighbouring columns, which divides the number of columns, and every
// kStep-th row. Values that belong to a column stay in registers while the thread walks down the rows.
template <int kVec>
struct StackTile {
  static constexpr int kLanes = kStackColumns / kVec, kStep = kStackThreads / kLanes;

  int64_t matrix;
  int64_t column;       // first column of the thread
  int64_t first, last;  // its first row, and one past the last row of the block
  bool inside;          // whether the matrix has these columns

  __device__ StackTile(int64_t rows, int64_t columns) {
    const int64_t strips = (columns + kStackColumns - 1) / kStackColumns;
    const int64_t chunks = (rows + kStackRows - 1) / kStackRows, tile = blockIdx.x / strips;
    matrix = tile / chunks;
    column = blockIdx.x % strips * kStackColumns + threadIdx.x % kLanes * kVec;
    const int64_t top = tile % chunks * kStackRows;
    first = top + threadIdx.x / kLanes;
    last = top + kStackRows < rows ? top + kStackRows : rows;
    inside = column < columns;
  }
};

}  // namespace drot
