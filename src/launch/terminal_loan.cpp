#include "launch/terminal_loan.h"

#include <fcntl.h>
#include <unistd.h>

namespace fsdp::detail {

TerminalLoan::TerminalLoan()
    : terminal_(::open("/dev/tty", O_RDWR | O_CLOEXEC)) {
}

TerminalLoan::~TerminalLoan() {
  take_back();
}

bool TerminalLoan::lend(pid_t group) {
  const pid_t owner = ::tcgetpgrp(terminal_.get());
  if (!terminal_ || (owner != ::getpgrp() && owner != holder_) ||
      ::tcsetpgrp(terminal_.get(), group) != 0) {
    return false;
  }
  holder_ = group;
  return true;
}

void TerminalLoan::take_back() {
  if (holder_ != 0 && ::tcgetpgrp(terminal_.get()) == holder_) {
    ::tcsetpgrp(terminal_.get(), ::getpgrp());
  }
  holder_ = 0;
}

} // namespace fsdp::detail
