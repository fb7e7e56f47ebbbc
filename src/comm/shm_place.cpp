#include "comm/shm_place.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {

ShmPlace::ShmPlace(std::shared_ptr<ShmGroup> group) : group_(std::move(group)) {
}

void ShmPlace::add_child(std::shared_ptr<ShmPlace> child) {
  const std::lock_guard lock(mutex_);
  std::erase_if(children_, [](const auto& each) { return each->is_over(); });
  children_.push_back(std::move(child));
}

void ShmPlace::end_epoch(const std::string& failure) {
  group_->end_epoch(failure);
  const std::lock_guard lock(mutex_);
  for (const auto& child : children_) {
    child->end_epoch(failure);
  }
}

bool ShmPlace::is_over() {
  const std::lock_guard lock(mutex_);
  return group_->is_over() &&
      std::all_of(children_.begin(), children_.end(), [](const auto& each) {
           return each->is_over();
         });
}

} // namespace fsdp::detail
