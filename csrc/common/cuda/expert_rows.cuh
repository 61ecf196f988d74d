// Which rows of which expert a block of threads computes, for the kernels of a mixture of experts. The CPU
// that launches them does not know how many rows an expert has: it launches a block for each place where a
// block may begin, and a block in whose place none begins ends at once.
//
// A block has the rows of one expert, up to a multiple of kRows. So it begins where an expert begins, or at a
// multiple of kRows.
#pragma once

#include <cstdint>

namespace drot {

// ends: of each expert, as in common/expert_ends.h; null without experts. rows: of all experts.
struct ExpertRows {
  const int32_t* ends = nullptr;
  int experts = 0;
  int64_t rows = 0;
};

// The rows [first, stop) of an expert.
struct ExpertTile {
  int expert = 0;
  int64_t first = 0, stop = 0;
};

// How many places there are: each row, or the multiples of kRows and where each expert but the first begins.
constexpr int64_t expert_places(const ExpertRows& p, int64_t rows_of_tile) {
  const int64_t tiles = (p.rows + rows_of_tile - 1) / rows_of_tile, places = tiles + p.experts - 1;
  return p.rows < places ? p.rows : places;
}

// What the block at a place has; nothing, the same in all of its threads, if no block begins there. Each of
// kThreads threads calls it. No row beyond `rows` is computed, whatever the values of `ends`.
template <int kRows, int kThreads>
__device__ ExpertTile expert_tile(const ExpertRows& p, int64_t place) {
  const int64_t tiles = (p.rows + kRows - 1) / kRows;
  const bool by_rows = p.rows < tiles + p.experts - 1, by_experts = !by_rows && place >= tiles;
  const int64_t first = by_rows ? place : by_experts ? p.ends[place - tiles] : place * kRows;
  int expert = 0;  // experts that end before the row
  for (int e = 0; e < p.experts; e += kThreads) {
    const int at = e + static_cast<int>(threadIdx.x);
    expert += __syncthreads_count(at < p.experts && p.ends[at] <= first);
  }
  if (first < 0 || first >= p.rows || expert == p.experts) return {};
  const bool multiple = first % kRows == 0;
  const bool begins = by_experts ? !multiple && expert == place - tiles + 1
                                 : multiple || first == (expert == 0 ? 0 : p.ends[expert - 1]);
  if (!begins) return {};
  const int64_t next = (first / kRows + 1) * kRows, end = p.ends[expert] < p.rows ? p.ends[expert] : p.rows;
  return {expert, first, end < next ? end : next};
}

}  // namespace drot
