// How sparse24_linear's way on a GPU is chosen and remembered, with times that test_sparse24_ways.py makes
// up.
#include "ops/cuda/sparse24_ways.h"

#include <vector>

extern "C" drot::ChosenWays* new_process() { return new drot::ChosenWays; }
extern "C" void end_process(drot::ChosenWays* process) { delete process; }

// ways: n of them, as numbers; seconds of each. Returns the choice as text and adds to `measured`.
extern "C" const char* choose(drot::ChosenWays* process, const char* key, const int* ways, int n,
                              bool may_measure, const double* seconds, int* measured) {
  static std::string text;
  std::vector<drot::Way> list;
  for (int i = 0; i < n; ++i) list.push_back(static_cast<drot::Way>(ways[i]));
  text = drot::text_of(process->of(key, list, may_measure, [&](drot::Way way) -> drot::Measured {
    ++*measured;
    for (int i = 0; i < n; ++i) {
      if (list[static_cast<size_t>(i)] == way) return {seconds[i], {7, 2, 1, 3}};
    }
    return {0};
  }));
  return text.c_str();
}

extern "C" bool remember(const char* key, const char* value) { return drot::remember(key, value); }
