#include "launch/signal_watch.h"

#include "launch/launch_error.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

namespace fsdp::detail {
namespace {

constexpr int kForwarded[] =
    {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};

// Set by nohup, or by a shell for what it starts in the background.
bool is_ignored(int signal) {
  struct sigaction action = {};
  return ::sigaction(signal, nullptr, &action) == 0 &&
      action.sa_handler == SIG_IGN;
}

} // namespace

SignalWatch::SignalWatch() {
  // An ignored SIGCHLD would let the system forget how a rank ended.
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, &child_before_);
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, &pipe_before_);

  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGCHLD);
  for (const int signal : kForwarded) {
    if (!is_ignored(signal)) {
      sigaddset(&watched, signal);
    }
  }
  fd_ = UniqueFd(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    const int error = errno;
    restore();
    throw system_error("cannot watch signals (signalfd)", error);
  }
  // Blocked, it lets a process in the background write to the terminal and
  // take it back.
  sigaddset(&watched, SIGTTOU);
  ::sigprocmask(SIG_BLOCK, &watched, &mask_before_);
}

SignalWatch::~SignalWatch() {
  restore();
}

std::vector<int> SignalWatch::take() {
  std::vector<int> signals;
  signalfd_siginfo info = {};
  while (::read(fd_.get(), &info, sizeof(info)) == sizeof(info)) {
    signals.push_back(static_cast<int>(info.ssi_signo));
  }
  return signals;
}

void SignalWatch::restore() const {
  ::sigaction(SIGCHLD, &child_before_, nullptr);
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  ::sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
}

} // namespace fsdp::detail
