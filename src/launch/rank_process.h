#pragma once

#include "launch/exit_status.h"
#include "launch/rank_guard.h"
#include "launch/signal_watch.h"

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// What a rank runs, and with what.
struct RankCommand {
  std::vector<std::string> program = {}; // looked up in PATH, and its arguments
  std::vector<std::string> environment = {};
  std::vector<int> cpus = {}; // none: not bound
  int stdin_fd = 0;
  int stdout_fd = 1;
  int stderr_fd = 2;
};

/// A rank: a child process in a process group of its own. It is killed when the
/// process that started it ends.
///
/// An ended rank stays a zombie until `reap`, so that the number of its group
/// cannot become another's while the group may still be signalled.
class RankProcess {
 public:
  /// Returns when the program runs. Throws LaunchError with the exit code that
  /// a shell would give when it cannot be run.
  RankProcess(
      int rank,
      const RankCommand& command,
      const SignalWatch& signals,
      RankGuard& guard);
  /// Kills the group if it was not reaped.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return rank_; }
  pid_t pid() const { return pid_; }

  /// Looks whether the rank has ended. Never waits.
  bool has_ended();
  /// Of a rank that has ended.
  const ExitStatus& status() const { return *status_; }

  /// The signal that has stopped the rank since the last call.
  std::optional<int> take_stop();

  void signal_group(int signal) const;
  /// Not what the program has started.
  void signal_program(int signal) const;

  /// Kills what is left of the group. Waits until the rank is gone; false when
  /// it does not go, as a process that hangs in the system may do.
  bool reap();

 private:
  int rank_;
  RankGuard& guard_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  std::optional<ExitStatus> status_ = std::nullopt;
};

} // namespace fsdp::detail
