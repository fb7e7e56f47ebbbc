#pragma once

#include "launch/unique_fd.h"

#include <csignal>
#include <vector>

namespace fsdp::detail {

/// While it lives, the signals that concern a job are read here instead of
/// being delivered: SIGCHLD, and of those that end, inform, stop and continue a
/// job the ones that this process does not ignore. SIGPIPE is ignored. For a
/// process with one thread.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// Readable when a signal is there.
  int fd() const { return fd_.get(); }

  /// The signals that have come. Never waits.
  std::vector<int> take();

  /// Puts everything back as it was, for use between fork and exec.
  void restore() const;

 private:
  sigset_t mask_before_ = {};
  struct sigaction child_before_ = {};
  struct sigaction pipe_before_ = {};
  UniqueFd fd_;
};

} // namespace fsdp::detail
