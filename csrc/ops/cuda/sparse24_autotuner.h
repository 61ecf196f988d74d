// The autotuner of sparse24_linear on a GPU, used by sparse24_linear.cu: which algorithm computes a product.
// The candidates are measured at the first product of a kind; the result is kept in the tuning cache
// (common/tuning_cache.h).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/tuning_cache.h"

namespace drot {

// skinny:     the kernel of sparse24_skinny.cuh, for few tokens, on the packed weight.
// cusparselt: cuSPARSELt, on the compressed weight.
// dense:      the weight is unpacked at each call and multiplied by cuBLAS.
enum class Algorithm { skinny, cusparselt, dense };

constexpr std::array<std::string_view, 3> kAlgorithmNames = {"skinny", "cusparselt", "dense"};

inline std::string_view name_of(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

// Attributes of cuSPARSELt's algorithm selection: CUSPARSELT_MATMUL_ALG_CONFIG_ID and
// CUSPARSELT_MATMUL_SPLIT_K, …_SPLIT_K_MODE, …_SPLIT_K_BUFFERS. id = -1: cuSPARSELt's default.
struct CusparseltConfig {
  int id = -1, split_k = 0, split_k_mode = 0, split_k_buffers = 0;
  auto operator<=>(const CusparseltConfig&) const = default;
};

struct Choice {
  Algorithm algorithm;
  CusparseltConfig config = {};  // for Algorithm::cusparselt
  bool operator==(const Choice&) const = default;
};

struct Measurement {
  double seconds;  // infinity if the algorithm failed
  CusparseltConfig config = {};
};

// `skinny`, `dense`, or `cusparselt` and the four numbers of its config.
inline std::string to_text(const Choice& choice) {
  std::ostringstream text;
  text << name_of(choice.algorithm);
  if (choice.algorithm == Algorithm::cusparselt) {
    const CusparseltConfig& c = choice.config;
    text << ' ' << c.id << ' ' << c.split_k << ' ' << c.split_k_mode << ' ' << c.split_k_buffers;
  }
  return text.str();
}

// The inverse of to_text. Empty for other text, such as lines of older versions of drot, and for an algorithm
// that is not a candidate.
inline std::optional<Choice> parse_choice(const std::string& text, std::span<const Algorithm> candidates) {
  std::istringstream words(text);
  std::string name, rest;
  words >> name;
  for (const Algorithm candidate : candidates) {
    if (name != name_of(candidate)) continue;
    Choice choice{candidate};
    CusparseltConfig& c = choice.config;
    if (candidate == Algorithm::cusparselt &&
        !(words >> c.id >> c.split_k >> c.split_k_mode >> c.split_k_buffers)) {
      return {};
    }
    if (words >> rest) return {};
    return choice;
  }
  return {};
}

// Products with numbers of tokens in the same bucket share one choice. The bucket is the next power of two.
inline int64_t token_bucket(int64_t tokens) {
  int64_t bucket = 1;
  while (bucket < tokens) bucket *= 2;
  return bucket;
}

// The tokens for which cuSPARSELt plans a product, a multiple of 8 that is at most a sixteenth more than
// `tokens` from 128 on: prompts of neighbouring lengths share a plan, which takes longer to make than a row.
inline int64_t planned_tokens(int64_t tokens) {
  const int64_t step = std::max<int64_t>(8, token_bucket(tokens) / 32);
  return (tokens + step - 1) / step * step;
}

class Autotuner {
 public:
  // The fastest candidate, from this process, from the tuning cache or by two measurements. The tuning cache
  // gets the choice only if both measurements name the same algorithm and no candidate fails, for example for
  // lack of memory. Otherwise the choice is kept for this process only.
  //
  // Args:
  //   key: names the kind of product.
  //   candidates: algorithms that support the product.
  //   may_measure: if false and the choice is unknown, the first candidate is returned and nothing is kept.
  //   measure: called with `candidates`, returns a Measurement for each.
  template <class Measure>
  Choice choose(const std::string& key, std::span<const Algorithm> candidates, bool may_measure,
                Measure measure) {
    const std::lock_guard<std::mutex> guard(mutex_);  // two measurements at a time would slow each other down
    if (const auto known = choices_.find(key); known != choices_.end()) return known->second;
    if (const auto text = tuning_cache::lookup(key)) {
      if (const auto choice = parse_choice(*text, candidates)) return choices_[key] = *choice;
    }
    if (!may_measure) return {candidates.front()};
    const Fastest first = fastest_of(candidates, measure(candidates));
    const Fastest second = fastest_of(candidates, measure(candidates));
    const Fastest& best = second.seconds < first.seconds ? second : first;
    if (first.choice.algorithm == second.choice.algorithm && first.all_succeeded && second.all_succeeded) {
      tuning_cache::store(key, to_text(best.choice));
    }
    return choices_[key] = best.choice;
  }

  // Replaces a choice whose algorithm failed, for this process only. A choice that is not known stays
  // unknown: an algorithm that failed before a measurement, while a CUDA graph was captured, says nothing
  // about the others.
  void replace(const std::string& key, const Choice& choice) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (const auto known = choices_.find(key); known != choices_.end()) known->second = choice;
  }

 private:
  struct Fastest {
    Choice choice;
    double seconds = std::numeric_limits<double>::infinity();
    bool all_succeeded = true;
  };

  // The first candidate if all failed.
  static Fastest fastest_of(std::span<const Algorithm> candidates,
                            const std::vector<Measurement>& measurements) {
    Fastest best{{candidates.front()}};
    for (size_t i = 0; i < candidates.size(); ++i) {
      best.all_succeeded &= std::isfinite(measurements[i].seconds);
      if (measurements[i].seconds >= best.seconds) continue;
      best.seconds = measurements[i].seconds;
      best.choice = {candidates[i], measurements[i].config};
    }
    return best;
  }

  std::mutex mutex_;
  std::map<std::string, Choice> choices_;
};

}  // namespace drot
