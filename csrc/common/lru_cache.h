// A map with a limited number of entries: a new entry replaces the entry that was used longest ago.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <utility>

namespace drot {

template <class Key, class Value>
class LruCache {
 public:
  // most: the largest number of entries, at least 1.
  explicit LruCache(std::size_t most) : most_(most) {}

  // The value of `key`. If it is missing, it becomes make(); if make throws, the entries stay as they were.
  // The reference is valid until the next call.
  template <class Make>
  Value& get(const Key& key, Make make) {
    if (const auto known = places_.find(key); known != places_.end()) {
      entries_.splice(entries_.begin(), entries_, known->second);
      return entries_.front().second;
    }
    entries_.emplace_front(key, make());
    places_[key] = entries_.begin();
    if (entries_.size() > most_) {
      places_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return entries_.front().second;
  }

 private:
  std::size_t most_;
  std::list<std::pair<Key, Value>> entries_;  // the entry that was used last comes first
  std::map<Key, typename std::list<std::pair<Key, Value>>::iterator> places_;
};

}  // namespace drot
