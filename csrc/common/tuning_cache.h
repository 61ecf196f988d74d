// The tuning cache: a text file that keeps the results of measurements on this machine for later processes.
// The autotuner of sparse24_linear (ops/cuda/sparse24_autotuner.h) reads and writes it.
//
// Each line is a key, a tab and a value. Of several lines with one key the last is valid. To measure
// everything again, delete the file.
#pragma once

#include <optional>
#include <string>

namespace drot::tuning_cache {

// The path: measured.txt in the folder $DROT_CACHE, else $XDG_CACHE_HOME/drot, else ~/.cache/drot. "" if none
// of the three variables is set or DROT_CACHE is empty; then nothing is stored.
std::string file();

// The value of the last line with this key.
std::optional<std::string> lookup(const std::string& key);

// Appends a line. Neither key nor value may contain a tab or a line break. Returns false if the file cannot
// be written.
bool store(const std::string& key, const std::string& value);

}  // namespace drot::tuning_cache
