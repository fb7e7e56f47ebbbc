#pragma once

#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// What the environments of all ranks of a job have in common.
struct JobEnvironment {
  std::string job; // unique for this start
  int ranks = 1;
  int master_port = 0;
  /// OMP_NUM_THREADS, also where the user has set it; not set: what the user
  /// has set, or else `default_threads`.
  std::optional<int> threads = std::nullopt;
  int default_threads = 1;
  std::optional<std::string> backend = std::nullopt;   // LIBFSDP_BACKEND
  std::optional<std::string> timeout_s = std::nullopt; // LIBFSDP_TIMEOUT
};

/// "NAME=value" for each variable of `rank`: those of `inherited`, and what
/// tells the rank who it is.
std::vector<std::string> rank_environment(
    const std::vector<std::string>& inherited,
    const JobEnvironment& job,
    int rank);

/// The environment of this process.
std::vector<std::string> own_environment();

/// A name that no other job has: of pid, start time and random bits.
std::string new_job_name();

} // namespace fsdp::detail
