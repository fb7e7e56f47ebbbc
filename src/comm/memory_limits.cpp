#include "comm/memory_limits.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <optional>
#include <utility>

namespace fsdp::detail {
namespace {

// The files of one version of memory cgroups.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  std::array<const char*, 2> cached; // rows of memory.stat
};

constexpr CgroupFiles kCgroupV1{
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    {"total_inactive_file", "total_active_file"}};
constexpr CgroupFiles kCgroupV2{
    "memory.max",
    "memory.current",
    {"inactive_file", "active_file"}};

// The number in a file; nothing when there is none, as in "max".
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) {
    return value;
  }
  return std::nullopt;
}

// The number after the word `name` in a file.
std::optional<uint64_t> row_of(
    const std::string& path,
    const std::string& name) {
  std::ifstream file(path);
  std::string word;
  uint64_t value = 0;
  while (file >> word) {
    if (word == name && file >> value) {
      return value;
    }
  }
  return std::nullopt;
}

void lower(MemoryLimits& limits, uint64_t available, std::string scope) {
  if (available < limits.available) {
    limits = {available, std::move(scope)};
  }
}

void apply_system(MemoryLimits& limits, const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const auto available = row_of(path, "MemAvailable:");
  const auto total = row_of(path, "MemTotal:");
  if (available && total) {
    lower(
        limits,
        *available * 1024,
        "the " + byte_text(*total * 1024) + " of this host");
  }
}

void apply_cgroup(
    MemoryLimits& limits,
    const CgroupFiles& files,
    const std::string& mount,
    const std::string& group) {
  const std::string folder = mount + group + "/";
  const auto limit = number_in(folder + files.limit);
  const auto usage = number_in(folder + files.usage);
  if (!limit || !usage) {
    return;
  }
  uint64_t cached = 0;
  for (const char* row : files.cached) {
    cached += row_of(folder + "memory.stat", row).value_or(0);
  }
  const uint64_t used = *usage - std::min(*usage, cached);
  lower(
      limits,
      *limit - std::min(*limit, used),
      "the " + byte_text(*limit) + " that memory cgroup '" +
          (group.empty() ? "/" : group) + "' allows");
}

// The group and all above it. A container often sees its own group as the root
// of the mount and yet a longer path here, of which nothing is found.
void apply_cgroups_up(
    MemoryLimits& limits,
    const CgroupFiles& files,
    const std::string& mount,
    std::string group) {
  while (!group.empty()) {
    if (group != "/") {
      apply_cgroup(limits, files, mount, group);
    }
    group.resize(group.find_last_of('/'));
  }
  apply_cgroup(limits, files, mount, group);
}

} // namespace

std::string byte_text(uint64_t bytes) {
  static constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) {
    return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  }
  size_t unit = 0;
  double value = static_cast<double>(bytes) / 1024;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string MemoryLimits::text() const {
  return scope.empty() ? "an unknown amount"
                       : byte_text(available) + " of " + scope;
}

MemoryLimits MemoryLimits::now(const std::string& root) {
  MemoryLimits limits;
  apply_system(limits, root);
  const std::string mount = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line; // "4:cpu,memory:/group" for version 1, "0::/group" for 2
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) {
      continue;
    }
    const std::string controllers =
        "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      apply_cgroups_up(limits, kCgroupV2, mount, group);
    } else if (controllers.find(",memory,") != std::string::npos) {
      apply_cgroups_up(limits, kCgroupV1, mount + "/memory", group);
    }
  }
  return limits;
}

} // namespace fsdp::detail
