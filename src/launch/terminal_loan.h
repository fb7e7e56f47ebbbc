#pragma once

#include "launch/unique_fd.h"

#include <sys/types.h>

namespace fsdp::detail {

/// Lends the terminal to a rank that reads from it, as a shell does: ranks have
/// process groups of their own, and the terminal serves one group at a time.
class TerminalLoan {
 public:
  TerminalLoan();
  /// Takes it back.
  ~TerminalLoan();
  TerminalLoan(const TerminalLoan&) = delete;
  TerminalLoan& operator=(const TerminalLoan&) = delete;

  /// Whether the terminal could be lent: it is the caller's, or lent already.
  bool lend(pid_t group);
  void take_back();
  bool is_lent_to(pid_t group) const { return holder_ == group; }

 private:
  UniqueFd terminal_;
  pid_t holder_ = 0;
};

} // namespace fsdp::detail
