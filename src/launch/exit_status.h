#pragma once

#include <string>

namespace fsdp::detail {

/// How a process ended.
struct ExitStatus {
  int exit_code = 0;
  int signal = 0; // 0: it exited
  bool dumped_core = false;

  bool ok() const { return exit_code == 0 && signal == 0; }

  /// What a shell would show as its `$?`.
  int shell_code() const { return signal != 0 ? 128 + signal : exit_code; }

  /// "exit status 3", "killed by SIGSEGV (Segmentation fault), core dumped"
  std::string describe() const;
};

/// "SIGTERM"
std::string signal_name(int signal);

} // namespace fsdp::detail
