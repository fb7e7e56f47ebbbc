#include "runtime/involvement.h"

#include "runtime/arrival_hook.h"
#include "runtime/net.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace fsdp::detail {

namespace {

/// The end of a region that is open.
constexpr uint64_t kOpen = std::numeric_limits<uint64_t>::max();

/// The regions of each net, by the thread that recorded in them. Sequence
/// numbers of a thread only grow and regions of one net do not overlap, so each
/// list is sorted.
class RegionHistory {
 public:
  struct Region {
    uint64_t begin;
    uint64_t end;
  };

  void
  begin(uint64_t thread, const std::weak_ptr<Net>& net, uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    auto& regions = list_of(nets_[thread], net);
    if (regions.size() >= kMaxRegions) { // graphs so old are gone
      regions.erase(regions.begin(), regions.begin() + kMaxRegions / 2);
    }
    if (!regions.empty()) {
      regions.back().end = std::min(regions.back().end, sequence);
    }
    regions.push_back({sequence, kOpen});
  }

  void end(uint64_t thread, const std::weak_ptr<Net>& net, uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    auto& regions = list_of(nets_[thread], net);
    if (regions.empty()) {
      return;
    }
    regions.back().end = sequence;
    if (regions.back().begin >= sequence) { // recorded nothing
      regions.pop_back();
    }
  }

  /// Calls `found` for each net in whose region the node was made.
  template <class F>
  void find(uint64_t thread, uint64_t sequence, F&& found) {
    const std::lock_guard lock(mutex_);
    const auto nets = nets_.find(thread);
    if (nets == nets_.end()) {
      return;
    }
    for (const auto& [net, regions] : nets->second) {
      const auto region = std::upper_bound(
          regions.begin(),
          regions.end(),
          sequence,
          [](uint64_t value, const Region& each) { return value < each.end; });
      if (region != regions.end() && region->begin <= sequence) {
        found(net);
      }
    }
  }

 private:
  static constexpr size_t kMaxRegions = 1 << 16;
  using Regions = std::vector<Region>;
  using Nets = std::vector<std::pair<std::weak_ptr<Net>, Regions>>;

  static Regions& list_of(Nets& nets, const std::weak_ptr<Net>& net) {
    std::erase_if(nets, [](const auto& each) { return each.first.expired(); });
    for (auto& [owner, regions] : nets) {
      if (!owner.owner_before(net) && !net.owner_before(owner)) {
        return regions;
      }
    }
    return nets.emplace_back(net, Regions{}).second;
  }

  std::mutex mutex_;
  std::unordered_map<uint64_t, Nets> nets_;
};

RegionHistory& history() {
  static auto* instance = new RegionHistory; // used until the process ends
  return *instance;
}

using NetList = std::vector<std::shared_ptr<Net>>;

void insert(NetList& nets, std::shared_ptr<Net> net) {
  if (net && std::find(nets.begin(), nets.end(), net) == nets.end()) {
    nets.push_back(std::move(net));
  }
}

void add_nets_of(torch::autograd::Node& node, NetList& nets) {
  if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
    if (auto* net = net_of(leaf->variable)) {
      insert(nets, net->shared_from_this());
    }
    return;
  }
  history().find(
      node.thread_id(), node.sequence_nr(), [&](const std::weak_ptr<Net>& net) {
        insert(nets, net.lock());
      });
}

} // namespace

uint64_t begin_region(const std::weak_ptr<Net>& net) {
  const auto thread = at::RecordFunction::currentThreadId();
  history().begin(thread, net, at::sequence_number::peek());
  return thread;
}

void end_region(const std::weak_ptr<Net>& net, uint64_t thread) {
  // Another thread may close it: then the next region of the net bounds it.
  const bool same = thread == at::RecordFunction::currentThreadId();
  history().end(thread, net, same ? at::sequence_number::peek() : kOpen);
}

NetList involved_nets(const torch::autograd::edge_list& roots) {
  NetList nets;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> stack;
  const auto visit = [&](const torch::autograd::edge_list& edges) {
    for (const auto& edge : edges) {
      if (edge.function && seen.insert(edge.function.get()).second) {
        stack.push_back(edge.function.get());
      }
    }
  };
  visit(roots);
  while (!stack.empty()) {
    auto* node = stack.back();
    stack.pop_back();
    add_nets_of(*node, nets);
    visit(node->next_edges());
  }
  std::sort(nets.begin(), nets.end(), [](const auto& a, const auto& b) {
    return a->id() < b->id();
  });
  return nets;
}

} // namespace fsdp::detail
