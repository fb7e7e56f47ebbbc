#pragma once

#include <fsdp/communicator.h>

#include <chrono>
#include <memory>
#include <vector>

namespace fsdp::detail {

/// Communicators of `size` ranks that are threads of this process, by rank.
/// Each rank's contribution is copied when it calls, so a call never waits for
/// a peer; results are computed in rank order by the rank that waits for them.
std::vector<std::shared_ptr<Communicator>> make_thread_communicators(
    int size,
    std::chrono::milliseconds timeout);

/// Says that the rank of `communicator`, one of make_thread_communicators(),
/// calls nothing any more, here or in what was split from it: peers that wait
/// for it fail at once, now and ever after, even if some of these communicators
/// still exist. What exists no more says so by itself.
void leave_for_good(Communicator& communicator);

} // namespace fsdp::detail
