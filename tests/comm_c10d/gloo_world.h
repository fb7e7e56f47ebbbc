#pragma once

#include "comm/gloo_communicator.h"
#include "comm/thread_world.h"

#include <chrono>
#include <memory>
#include <vector>

namespace fsdp::detail {

inline constexpr std::chrono::seconds kGlooLimit(20);

/// A world of Gloo whose ranks are threads that meet at a HashStore.
JoinWorld make_world_of_gloo(
    int size,
    std::chrono::milliseconds timeout,
    CompareCalls compare_calls = CompareCalls::kNo);

/// The communicators of such a world, by rank: issuing never waits, so one
/// thread can be all ranks.
std::vector<std::shared_ptr<Communicator>> join_all(
    const JoinWorld& join,
    int size);

/// Splits all into one group each, of all ranks.
std::vector<std::shared_ptr<Communicator>> split_all(
    const std::vector<std::shared_ptr<Communicator>>& comms);

} // namespace fsdp::detail
