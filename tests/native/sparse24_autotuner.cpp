// The autotuner of sparse24_linear with made-up times, for test_sparse24_autotuner.py.
#include "ops/cuda/sparse24_autotuner.h"

#include <vector>

extern "C" drot::Autotuner* new_autotuner() { return new drot::Autotuner; }

// Returns the choice as text.
//
// Args:
//   algorithms: the candidates, `n` values of the enumeration.
//   seconds: the time of each candidate.
//   measured: is increased by the number of candidates that are measured.
extern "C" const char* choose(drot::Autotuner* autotuner, const char* key, const int* algorithms, int n,
                              bool may_measure, const double* seconds, int* measured) {
  static std::string text;
  std::vector<drot::Algorithm> candidates;
  for (int i = 0; i < n; ++i) candidates.push_back(static_cast<drot::Algorithm>(algorithms[i]));
  const auto measure = [&](std::span<const drot::Algorithm> of) {
    std::vector<drot::Measurement> measurements;
    for (size_t i = 0; i < of.size(); ++i) {
      ++*measured;
      const bool cusparselt = of[i] == drot::Algorithm::cusparselt;
      measurements.push_back(
          {seconds[i], cusparselt ? drot::CusparseltConfig{7, 2, 1, 3} : drot::CusparseltConfig{}});
    }
    return measurements;
  };
  text = drot::to_text(autotuner->choose(key, candidates, may_measure, measure));
  return text.c_str();
}

extern "C" bool store(const char* key, const char* value) { return drot::tuning_cache::store(key, value); }
