#include "launch/exit_status.h"

#include <csignal>
#include <cstring>

namespace fsdp::detail {

std::string signal_name(int signal) {
  const char* abbreviation = ::sigabbrev_np(signal);
  return abbreviation == nullptr ? "signal " + std::to_string(signal)
                                 : std::string("SIG") + abbreviation;
}

std::string ExitStatus::describe() const {
  if (signal == 0) {
    return "exit status " + std::to_string(exit_code);
  }
  std::string text = "killed by " + signal_name(signal);
  if (const char* description = ::sigdescr_np(signal)) {
    text += std::string(" (") + description + ")";
  }
  return dumped_core ? text + ", core dumped" : text;
}

} // namespace fsdp::detail
