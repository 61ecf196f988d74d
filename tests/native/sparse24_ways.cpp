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
  text = drot::text_of(process->of(key, list, may_measure, [&](std::span<const drot::Way> ways) {
    std::vector<drot::Measured> found;
    for (size_t i = 0; i < ways.size(); ++i) {
      ++*measured;
      const bool library = ways[i] == drot::Way::library;
      found.push_back({seconds[i], library ? drot::LibraryAlgorithm{7, 2, 1, 3} : drot::LibraryAlgorithm{}});
    }
    return found;
  }));
  return text.c_str();
}

extern "C" bool remember(const char* key, const char* value) { return drot::remember(key, value); }
