#pragma once

#include "runtime/flat_group.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

inline bool is_hybrid(Strategy strategy) {
  return strategy == Strategy::kHybridShard ||
      strategy == Strategy::kHybridShardGradOp;
}

/// Whether weights stay whole from forward to backward.
inline bool keeps_for_backward(Strategy strategy) {
  return strategy == Strategy::kShardGradOp ||
      strategy == Strategy::kHybridShardGradOp;
}

/// The parameters that are gathered, reduced and released together: one flat
/// group for each dtype, requires_grad flag and precision.
struct Unit {
  std::string name;
  uint32_t index = 0; // in its net
  Strategy strategy = Strategy::kFullShard;
  std::vector<std::unique_ptr<FlatGroup>> groups;

  /// unshard() was called: stays whole between regions until reshard().
  bool held = false;

  /// Whether its weights stay whole between regions.
  bool stays_whole() const {
    return held || strategy == Strategy::kShardOptimizer;
  }

  /// Whether all groups are ordinary tensors, which nobody gathers.
  bool is_plain() const {
    return all([](const FlatGroup& group) { return group.is_plain(); });
  }
  bool is_whole() const {
    return all([](const FlatGroup& group) { return group.is_whole(); });
  }
  /// Whole, or on the way to it.
  bool is_gathered() const {
    return all([](const FlatGroup& group) {
      return group.is_whole() || group.is_gathering();
    });
  }

  void start_gather() { each(&FlatGroup::start_gather); }
  void finish_gather() { each(&FlatGroup::finish_gather); }
  void gather() {
    start_gather();
    finish_gather();
  }
  void release(KeepPart keep = KeepPart::kNo) {
    for (const auto& group : groups) {
      group->release(keep);
    }
  }
  void flush_writes() { each(&FlatGroup::flush_writes); }
  void discard() { each(&FlatGroup::discard); }

 private:
  template <class F>
  bool all(F&& holds) const {
    return std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
      return holds(*group);
    });
  }
  void each(void (FlatGroup::*action)()) {
    for (const auto& group : groups) {
      ((*group).*action)();
    }
  }
};

} // namespace fsdp::detail
