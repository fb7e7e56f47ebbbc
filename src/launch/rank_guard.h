#pragma once

#include "launch/unique_fd.h"

#include <sys/types.h>

namespace fsdp::detail {

/// A small process that outlives the launcher when that is killed, and then
/// kills the process groups of the ranks. The system itself kills a rank whose
/// launcher dies, but not what the rank has started, such as the program in a
/// wrapper script.
class RankGuard {
 public:
  RankGuard();
  /// Ends the guard.
  ~RankGuard();
  RankGuard(const RankGuard&) = delete;
  RankGuard& operator=(const RankGuard&) = delete;

  pid_t pid() const { return pid_; }

  void watch(pid_t group);
  /// To be called while the group is still there: later its number may be
  /// another's.
  void forget(pid_t group);

 private:
  UniqueFd orders_;
  pid_t pid_ = -1;
};

} // namespace fsdp::detail
