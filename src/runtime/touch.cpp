#include "runtime/touch.h"

#include "runtime/flat_group.h"
#include "runtime/net.h"

#include <c10/util/irange.h>

#include <algorithm>

namespace fsdp::detail {

Pins::Pins(c10::SmallVector<FlatGroup*, 4> groups)
    : groups_(std::move(groups)) {
  // Net by net, in the order in which they were made: the same on all ranks.
  std::stable_sort(
      groups_.begin(), groups_.end(), [](FlatGroup* a, FlatGroup* b) {
        return a->net().id() < b->net().id();
      });
  each_net([&](Net& net, std::span<FlatGroup* const> of_net) {
    try {
      net.touch(of_net);
    } catch (...) {
      groups_.resize(pinned_);
      each_net([](Net& pinned, std::span<FlatGroup* const> unpin) {
        pinned.unpin(unpin);
      });
      throw;
    }
    pinned_ += of_net.size();
  });
}

Pins::~Pins() {
  each_net(
      [](Net& net, std::span<FlatGroup* const> of_net) { net.unpin(of_net); });
}

template <class F>
void Pins::each_net(F&& visit) {
  for (size_t begin = 0; begin < groups_.size();) {
    auto& net = groups_[begin]->net();
    size_t end = begin + 1;
    while (end < groups_.size() && &groups_[end]->net() == &net) {
      ++end;
    }
    visit(net, std::span<FlatGroup* const>(&groups_[begin], end - begin));
    begin = end;
  }
}

bool is_parameter(const FlatGroup& group, const at::Tensor& tensor) {
  const auto& parameters = group.parameters();
  return std::any_of(
      parameters.begin(), parameters.end(), [&](const Parameter& each) {
        return each.tensor.is_same(tensor);
      });
}

const std::string& shard_name(
    const FlatGroup& group,
    const at::Tensor& tensor) {
  const auto& parameters = group.parameters();
  for (const auto& parameter : parameters) {
    if (parameter.tensor.is_same(tensor)) {
      return parameter.name();
    }
  }
  const auto offset = tensor.storage_offset();
  for (const auto i : c10::irange(group.layout().size())) {
    const auto owned = group.layout().owned_in_slice(i, group.position());
    if (offset >= owned.begin && offset < owned.end) {
      return parameters[i].name();
    }
  }
  return parameters.front().name();
}

const std::string& gradient_name(
    const FlatGroup& group,
    const at::Tensor& tensor) {
  for (const auto& parameter : group.parameters()) {
    if (parameter.tensor.grad().is_same(tensor)) {
      return parameter.name();
    }
  }
  return group.parameters().front().name();
}

} // namespace fsdp::detail
