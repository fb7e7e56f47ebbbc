#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace fsdp::detail {

/// What a wait does when. It sleeps, first briefly, then for a fraction of what
/// it has lasted, so that it adds little to any wait and costs little in a long
/// one.
class C10dWait {
 public:
  using Clock = std::chrono::steady_clock;

  explicit C10dWait(std::chrono::milliseconds timeout)
      : timeout_(std::min<std::chrono::milliseconds>(timeout, kLongestWait)),
        next_mark_(std::min<Clock::duration>(kFirstMark, timeout_ / 4)) {}

  bool is_over() const { return waited() >= timeout_; }

  /// Whether to look into the store for what the peers say.
  bool look_is_due() { return due(next_look_, kLook); }

  /// Whether to tell the peers where this rank waits.
  bool mark_is_due() { return due(next_mark_, std::min(waited(), kLastMark)); }

  void pause() const {
    constexpr Clock::duration kShortest = std::chrono::microseconds(20);
    constexpr Clock::duration kLongest = std::chrono::milliseconds(1);
    const Clock::duration fraction = waited() / 16;
    if (fraction < kShortest / 4) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::clamp(fraction, kShortest, kLongest));
    }
  }

 private:
  // Far enough for any limit, near enough that no clock overflows.
  static constexpr std::chrono::hours kLongestWait{24 * 365};
  static constexpr Clock::duration kLook = std::chrono::milliseconds(50);
  static constexpr Clock::duration kFirstMark = std::chrono::seconds(1);
  static constexpr Clock::duration kLastMark = std::chrono::seconds(10);

  Clock::duration waited() const { return Clock::now() - start_; }

  bool due(Clock::duration& next, Clock::duration interval) const {
    const bool is_due = waited() >= next;
    next = is_due ? waited() + interval : next;
    return is_due;
  }

  const Clock::time_point start_ = Clock::now();
  const std::chrono::milliseconds timeout_;
  Clock::duration next_look_ = kLook / 5; // a failure may be there already
  Clock::duration next_mark_;
};

} // namespace fsdp::detail
