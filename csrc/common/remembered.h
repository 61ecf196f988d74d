// What was measured once on this machine, kept in a text file for the processes to come: a line for each
// measurement, its key, a tab and its value. A later line of the same key counts. To forget, delete the file.
#pragma once

#include <optional>
#include <string>

namespace drot {

// measured.txt in the folder $DROT_CACHE, else $XDG_CACHE_HOME/drot, else ~/.cache/drot. "" where there is
// none of these or DROT_CACHE is empty: nothing is then remembered.
std::string remembered_file();

std::optional<std::string> recall(const std::string& key);

// Neither key nor value has a tab or the end of a line. False where the file cannot be written.
bool remember(const std::string& key, const std::string& value);

}  // namespace drot
