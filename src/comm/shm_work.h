#pragma once

#include "comm/shm_group.h"

#include <fsdp/communicator.h>

#include <functional>
#include <memory>
#include <utility>

namespace fsdp::detail {

/// A call, or two of which the second takes up the result of the first.
class ShmWork : public Work {
 public:
  ShmWork(
      std::shared_ptr<ShmGroup> group,
      ShmGroup::Operation operation,
      std::function<void()> detach)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        detach_(std::move(detach)) {}

  ~ShmWork() override { group_->abandon(operation_, detach_); }

  ShmWork(const ShmWork&) = delete;
  ShmWork& operator=(const ShmWork&) = delete;

  bool ready() override { return group_->ready(operation_); }

  void wait() override { group_->wait(operation_); }

 private:
  std::shared_ptr<ShmGroup> group_;
  ShmGroup::Operation operation_;
  std::function<void()> detach_;
};

} // namespace fsdp::detail
