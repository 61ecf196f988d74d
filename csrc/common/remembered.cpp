#include "common/remembered.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace drot {

namespace fs = std::filesystem;

std::string remembered_file() {
  const auto named = [](const char* variable) {
    const char* value = std::getenv(variable);
    return std::string(value ? value : "");
  };
  fs::path folder;
  if (std::getenv("DROT_CACHE")) {
    folder = named("DROT_CACHE");
  } else if (const std::string cache = named("XDG_CACHE_HOME"); !cache.empty()) {
    folder = fs::path(cache) / "drot";
  } else if (const std::string home = named("HOME"); !home.empty()) {
    folder = fs::path(home) / ".cache" / "drot";
  }
  return folder.empty() ? "" : (folder / "measured.txt").string();
}

std::optional<std::string> recall(const std::string& key) {
  std::optional<std::string> value;
  std::ifstream lines(remembered_file());
  const std::string start = key + '\t';
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(start)) value = line.substr(start.size());
  }
  return value;
}

bool remember(const std::string& key, const std::string& value) {
  const std::string file = remembered_file();
  if (file.empty()) return false;
  std::error_code failed;
  fs::create_directories(fs::path(file).parent_path(), failed);
  const int to = open(file.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (to < 0) return false;
  flock(to, LOCK_EX);  // other processes append as well; it ends with close
  std::string line = key + '\t' + value + '\n';
  char last = '\n';  // a line that a full disk cut off must not spoil this one
  if (const off_t size = lseek(to, 0, SEEK_END);
      size > 0 && pread(to, &last, 1, size - 1) == 1 && last != '\n') {
    line.insert(0, 1, '\n');
  }
  const bool written = write(to, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  return close(to) == 0 && written;
}

}  // namespace drot
