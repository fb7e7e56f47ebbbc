#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace fsdp::detail {

/// Keeps SIGPIPE from this thread, and for good from the threads that are
/// started meanwhile: a write to a connection that a peer has closed is then an
/// error, and does not end the process. What the program does with the signal
/// elsewhere stays as it is.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::sigemptyset(&sigpipe_);
    ::sigaddset(&sigpipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }

  ~SigpipeBlock() {
    constexpr timespec kAtOnce{};
    if (!was_pending_) { // one that came meanwhile is ours
      ::sigtimedwait(&sigpipe_, nullptr, &kAtOnce);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  bool was_pending_;
  sigset_t sigpipe_;
  sigset_t before_;
};

} // namespace fsdp::detail
