#pragma once

#include "comm/shm_group.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp::detail {

/// A rank's group, and the groups that it got by splitting that. See [Note:
/// Failures reach children] in thread_communicator.cpp for why it outlives the
/// communicator; besides, peers may still read what a rank that is gone has
/// contributed.
class ShmPlace {
 public:
  explicit ShmPlace(std::shared_ptr<ShmGroup> group);

  const std::shared_ptr<ShmGroup>& group() const { return group_; }

  void add_child(std::shared_ptr<ShmPlace> child);

  /// Of this group, and of all below.
  void end_epoch(const std::string& failure);

 private:
  bool is_over();

  const std::shared_ptr<ShmGroup> group_;
  std::mutex mutex_; // children may be used by another thread
  std::vector<std::shared_ptr<ShmPlace>> children_;
};

} // namespace fsdp::detail
