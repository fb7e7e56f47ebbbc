#include "gloo_world.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <future>

namespace fsdp::detail {
namespace {

using Comms = std::vector<std::shared_ptr<Communicator>>;

// A failure takes new connections. This program's run_ranks() is over Gloo.
const bool is_chosen = [] {
  world_kind() = {
      [](int size, std::chrono::milliseconds timeout) {
        return make_world_of_gloo(size, timeout);
      },
      12};
  return true;
}();

Comms on_all(
    int size,
    const std::function<std::shared_ptr<Communicator>(int)>& make) {
  std::vector<std::future<std::shared_ptr<Communicator>>> made;
  for (int rank = 0; rank < size; ++rank) {
    made.push_back(std::async(std::launch::async, make, rank));
  }
  Comms comms;
  for (auto& each : made) {
    comms.push_back(each.get());
  }
  return comms;
}

} // namespace

JoinWorld make_world_of_gloo(
    int size,
    std::chrono::milliseconds timeout,
    CompareCalls compare_calls) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return [=](int rank) {
    return make_gloo_communicator(
        store, rank, size, timeout, GlooInterface::kLoopback, compare_calls);
  };
}

Comms join_all(const JoinWorld& join, int size) {
  return on_all(size, join);
}

Comms split_all(const Comms& comms) {
  return on_all(static_cast<int>(comms.size()), [&](int rank) {
    return comms[static_cast<size_t>(rank)]->split(0, rank);
  });
}

} // namespace fsdp::detail
