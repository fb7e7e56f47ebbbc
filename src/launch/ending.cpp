#include "launch/ending.h"

#include <csignal>

namespace fsdp::detail {

void Ending::rank_failed(Time now) {
  if (!kill_at_) {
    term_at_ = now + kOwnMessage;
    kill_at_ = *term_at_ + kAfterTerm;
  }
}

bool Ending::requested(Time now) {
  if (requested_at_) {
    if (now - *requested_at_ >= kSameRequest) {
      kill(now);
    }
    return false;
  }
  requested_at_ = now;
  if (!kill_at_) {
    kill_at_ = now + grace_;
  }
  return true;
}

std::optional<Ending::Time> Ending::next() const {
  if (killed_at_) {
    return *killed_at_ + kAfterKill;
  }
  return term_at_ ? term_at_ : kill_at_;
}

int Ending::take_due(Time now) {
  if (kill_at_ && !killed_at_ && now >= *kill_at_) {
    killed_at_ = now;
    return SIGKILL;
  }
  if (term_at_ && !killed_at_ && now >= *term_at_) {
    term_at_.reset();
    return SIGTERM;
  }
  return 0;
}

bool Ending::is_over(Time now) const {
  return killed_at_ && now >= *killed_at_ + kAfterKill;
}

} // namespace fsdp::detail
