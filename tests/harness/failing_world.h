#pragma once

#include "comm/failing_communicator.h"

#include <fsdp/world.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace fsdp::testing {

/// Collectives that fail on this rank. Calls are counted from arm() on.
class Injection {
 public:
  void arm(detail::FailurePlan plan) {
    plan_ = std::move(plan);
    ++version_;
  }
  void disarm() {
    plan_.reset();
    ++version_;
  }
  const std::optional<detail::FailurePlan>& plan() const { return plan_; }
  uint64_t version() const { return version_; }

 private:
  std::optional<detail::FailurePlan> plan_;
  uint64_t version_ = 0;
};

/// A world like `world`: the communicators that a net splits from it follow
/// `injection`, each by itself. The world's own communicator never fails.
World failing_world(
    const World& world,
    const std::shared_ptr<const Injection>& injection);

} // namespace fsdp::testing
