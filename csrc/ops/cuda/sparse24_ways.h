// The ways in which a GPU makes a product of sparse24_linear, and which of them is the fastest: that is
// measured at the first product of its kind and remembered (common/remembered.h), never guessed.
#pragma once

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

#include "common/remembered.h"

namespace drot {

// few: the kernel for few tokens, a block for each 16 of them; library: cuSPARSELt, where its layout of the
// weight is there; dense: the weight is made dense for cuBLAS.
enum class Way { few, library, dense };

constexpr std::array<std::string_view, 3> kWayNames = {"few", "library", "dense"};

// What cuSPARSELt's own search found; id -1 is the library's default.
struct LibraryAlgorithm {
  int id = -1, split = 0, split_mode = 0, split_buffers = 0;
  auto operator<=>(const LibraryAlgorithm&) const = default;
};

struct Choice {
  Way way;
  LibraryAlgorithm algorithm = {};
  bool operator==(const Choice&) const = default;
};

// seconds: infinity where the way cannot be gone.
struct Measured {
  double seconds;
  LibraryAlgorithm algorithm = {};
};

// `few`, `dense`, or `library` and its algorithm's four numbers.
inline std::string text_of(const Choice& choice) {
  std::ostringstream text;
  text << kWayNames[static_cast<size_t>(choice.way)];
  const LibraryAlgorithm& a = choice.algorithm;
  if (choice.way == Way::library) {
    text << ' ' << a.id << ' ' << a.split << ' ' << a.split_mode << ' ' << a.split_buffers;
  }
  return text.str();
}

// None for text that is not one of the ways.
inline std::optional<Choice> choice_of(const std::string& text, std::span<const Way> ways) {
  std::istringstream words(text);
  std::string name, rest;
  words >> name;
  for (const Way way : ways) {
    if (name != kWayNames[static_cast<size_t>(way)]) continue;
    Choice choice{way};
    LibraryAlgorithm& a = choice.algorithm;
    if (way == Way::library && !(words >> a.id >> a.split >> a.split_mode >> a.split_buffers)) return {};
    if (words >> rest) return {};
    return choice;
  }
  return {};
}

// Products of up to as many tokens are taken for alike: the next power of two.
inline int64_t alike_tokens(int64_t tokens) {
  int64_t most = 1;
  while (most < tokens) most *= 2;
  return most;
}

class ChosenWays {
 public:
  // For the products that `key` names. measure(ways) -> a Measured for each is called where nothing is
  // remembered and may_measure; where it may not, the first way is taken for this once. What was found
  // while one of them could not be gone, for want of memory say, counts for this process alone.
  template <class Measure>
  Choice of(const std::string& key, std::span<const Way> ways, bool may_measure, Measure measure) {
    const std::lock_guard<std::mutex> guard(lock_);  // two measurements at a time would disturb each other
    if (const auto found = chosen_.find(key); found != chosen_.end()) return found->second;
    if (const auto text = recall(key)) {
      if (const auto choice = choice_of(*text, ways)) return chosen_[key] = *choice;
    }
    Choice best{ways.front()};
    if (!may_measure) return best;
    double least = std::numeric_limits<double>::infinity();
    bool all_went = true;
    const std::vector<Measured> measured = measure(ways);
    for (size_t i = 0; i < ways.size(); ++i) {
      all_went &= std::isfinite(measured[i].seconds);
      if (measured[i].seconds >= least) continue;
      least = measured[i].seconds;
      best = {ways[i], measured[i].algorithm};
    }
    if (all_went) remember(key, text_of(best));
    return chosen_[key] = best;
  }

 private:
  std::mutex lock_;
  std::map<std::string, Choice> chosen_;
};

}  // namespace drot
