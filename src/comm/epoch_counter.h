#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace fsdp::detail {

/// The epoch of a communicator that never waits: it counts the failures of its
/// own, and from its start on those of the communicators it was split from.
class EpochCounter {
 public:
  explicit EpochCounter(std::shared_ptr<const EpochCounter> parent = nullptr)
      : parent_(std::move(parent)),
        parent_start_(parent_ ? parent_->value() : 0) {}

  void end_epoch() { ++own_; }

  uint64_t value() const {
    return own_ + (parent_ ? parent_->value() - parent_start_ : 0);
  }

 private:
  std::shared_ptr<const EpochCounter> parent_;
  uint64_t parent_start_;
  std::atomic<uint64_t> own_ = 0; // a child may be used by another thread
};

} // namespace fsdp::detail
