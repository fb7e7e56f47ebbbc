#pragma once

#include <chrono>
#include <optional>

namespace fsdp::detail {

/// How a job comes to its end: what the launcher sends to the ranks, and when.
///
/// After a failure the other ranks have a moment to end with a message of their
/// own, then SIGTERM, then SIGKILL, all within a second. After a request
/// (Ctrl-C) they have as long as the user says before SIGKILL.
class Ending {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  static constexpr std::chrono::milliseconds kOwnMessage{300};
  static constexpr std::chrono::milliseconds kAfterTerm{400};
  /// A second request within this time is the same one: `timeout` and some
  /// shells send theirs to the launcher and to its group.
  static constexpr std::chrono::milliseconds kSameRequest{300};
  /// For processes that even SIGKILL does not end.
  static constexpr std::chrono::seconds kAfterKill{5};

  explicit Ending(std::chrono::milliseconds grace) : grace_(grace) {}

  void rank_failed(Time now);

  /// Whether the signal that asks is to be passed on; the second request kills.
  bool requested(Time now);
  /// Kills at once.
  void kill(Time now) { kill_at_ = now; }

  /// When there is something to do; none: never.
  std::optional<Time> next() const;
  /// The signal that is to be sent now, or 0.
  int take_due(Time now);
  /// Whether waiting longer is in vain.
  bool is_over(Time now) const;

 private:
  std::chrono::milliseconds grace_;
  std::optional<Time> term_at_ = std::nullopt;
  std::optional<Time> kill_at_ = std::nullopt;
  std::optional<Time> requested_at_ = std::nullopt;
  std::optional<Time> killed_at_ = std::nullopt;
};

} // namespace fsdp::detail
