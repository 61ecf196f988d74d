// The tuning cache (tuning_cache.h), for several processes at a time.
#include "common/tuning_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace drot::tuning_cache {

namespace fs = std::filesystem;

std::string file() {
  const auto environment = [](const char* variable) {
    const char* value = std::getenv(variable);
    return std::string(value ? value : "");
  };
  fs::path folder;
  if (std::getenv("DROT_CACHE")) {
    folder = environment("DROT_CACHE");
  } else if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty()) {
    folder = fs::path(cache) / "drot";
  } else if (const std::string home = environment("HOME"); !home.empty()) {
    folder = fs::path(home) / ".cache" / "drot";
  }
  return folder.empty() ? "" : (folder / "measured.txt").string();
}

std::optional<std::string> lookup(const std::string& key) {
  std::optional<std::string> value;
  std::ifstream lines(file());
  const std::string start = key + '\t';
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(start)) value = line.substr(start.size());
  }
  return value;
}

bool store(const std::string& key, const std::string& value) {
  const std::string path = file();
  if (path.empty()) return false;
  std::error_code ignored;  // if the folder is missing, open fails
  fs::create_directories(fs::path(path).parent_path(), ignored);
  const int descriptor = open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) return false;
  flock(descriptor, LOCK_EX);  // other processes append too; close releases the lock
  std::string line = key + '\t' + value + '\n';
  // if the last line was cut off, for example by a full disk, the new line must not continue it
  char last = '\n';
  if (const off_t size = lseek(descriptor, 0, SEEK_END);
      size > 0 && pread(descriptor, &last, 1, size - 1) == 1 && last != '\n') {
    line.insert(0, 1, '\n');
  }
  const bool written = write(descriptor, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  return close(descriptor) == 0 && written;
}

}  // namespace drot::tuning_cache
