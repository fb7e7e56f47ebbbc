#include "schedule/reduction_order.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace fsdp::detail {
namespace {

size_t checked_group(uint32_t group, size_t groups) {
  if (group >= groups) {
    throw std::invalid_argument(
        "ReductionOrder: the group index is out of range: expected less than " +
        std::to_string(groups) + ", but got " + std::to_string(group) +
        ". Do all ranks have the same model?");
  }
  return group;
}

} // namespace

ReductionOrder::ReductionOrder(size_t groups)
    : has_(groups, false),
      is_completed_(groups, false) {
  forget();
}

void ReductionOrder::start_over() {
  completed_.clear();
  is_completed_.assign(is_completed_.size(), false);
  next_ = 0;
}

void ReductionOrder::completed(uint32_t group) {
  const auto index = checked_group(group, has_.size());
  if (!is_completed_[index]) { // gradients may arrive again in one pass
    is_completed_[index] = true;
    completed_.push_back(group);
  }
}

std::optional<uint32_t> ReductionOrder::turn() const {
  return next_ < agreed_.size() ? std::optional(agreed_[next_]) : std::nullopt;
}

void ReductionOrder::started_turn() {
  if (next_ >= agreed_.size()) {
    throw std::logic_error(
        "ReductionOrder: a reduction was started out of turn: expected at "
        "most " +
        std::to_string(agreed_.size()) +
        " in this pass. Call started_turn() once for each turn().");
  }
  ++next_;
}

std::vector<uint32_t> ReductionOrder::proposed(
    const std::vector<bool>& had_gradients) const {
  auto order = completed_;
  for (size_t group = 0; group < has_.size(); ++group) {
    if (had_gradients.at(group) && !is_completed_[group]) {
      order.push_back(static_cast<uint32_t>(group));
    }
  }
  return order;
}

void ReductionOrder::agree(std::vector<uint32_t> order) {
  std::vector<bool> seen(has_.size(), false);
  for (const auto group : order) {
    const auto index = checked_group(group, has_.size());
    if (seen[index]) {
      throw std::invalid_argument(
          "ReductionOrder: the agreed order has a group twice: expected each of"
          " " +
          std::to_string(has_.size()) + " at most once, but got group " +
          std::to_string(group) + " again. Do all ranks have the same model?");
    }
    seen[index] = true;
  }
  set_agreed(std::move(order));
}

void ReductionOrder::forget() {
  std::vector<uint32_t> order;
  for (size_t group = has_.size(); group-- > 0;) {
    order.push_back(static_cast<uint32_t>(group));
  }
  set_agreed(std::move(order));
  start_over();
}

void ReductionOrder::set_agreed(std::vector<uint32_t> order) {
  agreed_ = std::move(order);
  has_.assign(has_.size(), false);
  for (const auto group : agreed_) {
    has_[group] = true;
  }
}

} // namespace fsdp::detail
