#pragma once

#include <cstdint>
#include <string>

namespace fsdp::detail {

/// "3.1 GiB", "17 bytes".
std::string byte_text(uint64_t bytes);

/// How much memory this process could still take, as the system and its memory
/// cgroups see it. Swap does not count, files that are only cached do.
struct MemoryLimits {
  uint64_t available = UINT64_MAX; // the least of all; no limit when not known
  std::string scope = {}; // what allows no more: "the 23.5 GiB of this host"

  /// "21.8 GiB of the 23.5 GiB of this host".
  std::string text() const;

  /// Reads below `root`, which is there for tests.
  static MemoryLimits now(const std::string& root = "");
};

} // namespace fsdp::detail
