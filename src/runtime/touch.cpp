#include "runtime/touch.h"

#include "runtime/flat_group.h"
#include "runtime/net.h"

#include <c10/util/irange.h>

#include <algorithm>

namespace fsdp::detail {

Pins::Pins(c10::SmallVector<FlatGroup*, 4> groups) : groups_(std::move(groups)) {
  // Net by net, in order of appearance: the same order on all ranks.
  for (auto begin = groups_.begin(); begin != groups_.end();) {
    auto* net = &(*begin)->net();
    begin = std::stable_partition(begin, groups_.end(), [&](FlatGroup* each) {
      return &each->net() == net;
    });
  }
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
  each_net([](Net& net, std::span<FlatGroup* const> of_net) {
    net.unpin(of_net);
  });
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

const std::string& shard_name(const FlatGroup& group, const at::Tensor& tensor) {
  const auto offset = tensor.storage_offset();
  const auto& layout = group.layout();
  for (const auto i : c10::irange(layout.size())) {
    const auto owned = layout.owned_in_slice(i, group.position());
    const bool same = group.parameters()[i].tensor.is_same(tensor);
    if (same || (!owned.empty() && offset >= owned.begin && offset < owned.end)) {
      return group.parameters()[i].name();
    }
  }
  return group.parameters().front().name();
}

} // namespace fsdp::detail
