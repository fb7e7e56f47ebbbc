#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

namespace fsdp::detail {

/// The end of a wait that began when this was made.
class Deadline {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit Deadline(Milliseconds limit)
      : start_(Clock::now()),
        end_(start_ + std::min<Milliseconds>(limit, kLongest)) {}

  bool passed() const { return Clock::now() >= end_; }

  /// What is left, at most `most`; not less than 0.
  Milliseconds left(Milliseconds most) const {
    const auto left = std::chrono::ceil<Milliseconds>(end_ - Clock::now());
    return std::clamp(left, Milliseconds(0), most);
  }

  /// How long it has been waited, for messages: "10.0 s".
  std::string waited() const {
    const std::chrono::duration<double> time = Clock::now() - start_;
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", time.count());
    return text;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Far enough for any limit, near enough that the clock does not overflow.
  static constexpr std::chrono::hours kLongest{24 * 365};

  Clock::time_point start_;
  Clock::time_point end_;
};

} // namespace fsdp::detail
