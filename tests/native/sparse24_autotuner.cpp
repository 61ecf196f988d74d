// The autotuner of sparse24_linear with made-up times, and the cache of its plans, for
// test_sparse24_autotuner.py.
#include "ops/cuda/sparse24_autotuner.h"

#include <stdexcept>
#include <vector>

#include "common/lru_cache.h"

extern "C" drot::Autotuner* new_autotuner() { return new drot::Autotuner; }

// Returns the choice as text.
//
// Args:
//   algorithms: the candidates, `n` values of the enumeration.
//   seconds: the time of each candidate in the first measurement, then in the second.
//   measured: is increased by the number of candidates that are measured.
extern "C" const char* choose(drot::Autotuner* autotuner, const char* key, const int* algorithms, int n,
                              bool may_measure, const double* seconds, int* measured) {
  static std::string text;
  std::vector<drot::Algorithm> candidates;
  for (int i = 0; i < n; ++i) candidates.push_back(static_cast<drot::Algorithm>(algorithms[i]));
  const auto measure = [&, calls = 0](std::span<const drot::Algorithm> of) mutable {
    const double* times = seconds + n * calls++;
    std::vector<drot::Measurement> measurements;
    for (size_t i = 0; i < of.size(); ++i) {
      ++*measured;
      const bool cusparselt = of[i] == drot::Algorithm::cusparselt;
      measurements.push_back(
          {times[i], cusparselt ? drot::CusparseltConfig{7, 2, 1, 3} : drot::CusparseltConfig{}});
    }
    return measurements;
  };
  text = drot::to_text(autotuner->choose(key, candidates, may_measure, measure));
  return text.c_str();
}

extern "C" void replace_by_dense(drot::Autotuner* autotuner, const char* key) {
  autotuner->replace(key, {drot::Algorithm::dense});
}

// Asks a cache of `most` entries for each of `n` keys. `made` gets 1 where the value was not there. A
// negative key cannot be made; `made` gets -1 there.
extern "C" void use_cache(int most, const int* keys, int n, int* made) {
  drot::LruCache<int, int> cache(most);
  for (int i = 0; i < n; ++i) {
    made[i] = 0;
    try {
      const int value = cache.get(keys[i], [&] {
        if (keys[i] < 0) throw std::runtime_error("no such value");
        made[i] = 1;
        return 10 * keys[i];
      });
      if (value != 10 * keys[i]) made[i] = 2;
    } catch (const std::runtime_error&) {
      made[i] = -1;
    }
  }
}

extern "C" bool store(const char* key, const char* value) { return drot::tuning_cache::store(key, value); }

extern "C" int64_t planned(int64_t tokens) { return drot::planned_tokens(tokens); }
