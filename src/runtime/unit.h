#pragma once

#include "runtime/flat_group.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

/// The parameters that are gathered, reduced and released together: one flat
/// group for each dtype and requires_grad flag.
struct Unit {
  std::string name;
  Strategy strategy = Strategy::kFullShard;
  std::vector<std::unique_ptr<FlatGroup>> groups;

  /// Operators in flight that read its weights; released only at 0.
  int pins = 0;
  /// When it was touched last; units are released in this order.
  uint64_t last_touch = 0;
  /// unshard() was called: stays whole between regions until reshard().
  bool held = false;

  bool is_whole() const {
    for (const auto& group : groups) {
      if (!group->is_whole()) {
        return false;
      }
    }
    return true;
  }

  void gather() {
    for (const auto& group : groups) {
      group->start_gather();
    }
    for (const auto& group : groups) {
      group->finish_gather();
    }
  }

  void release() {
    for (const auto& group : groups) {
      group->release();
    }
  }

  void flush_writes() {
    for (const auto& group : groups) {
      group->flush_writes();
    }
  }

  void discard() {
    for (const auto& group : groups) {
      group->discard();
    }
  }
};

} // namespace fsdp::detail
