#pragma once

#include "launch/exit_status.h"
#include "launch/last_lines.h"

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace fsdp::detail {

/// A rank that did not end with status 0.
struct FailedRank {
  int rank = 0;
  pid_t pid = 0;
  ExitStatus status = {};
  std::chrono::milliseconds after{0}; // since the start of the job
};

/// What the launcher tells about a failure. `failed` is in the order of time;
/// `request` is the name of the signal by which the user had asked the job to
/// end, or empty; `log` is the first rank's, or empty.
std::string failure_report(
    const std::vector<FailedRank>& failed,
    const LastLines& last_lines,
    const std::string& request,
    const std::string& log);

} // namespace fsdp::detail
