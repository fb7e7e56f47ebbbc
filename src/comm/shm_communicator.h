#pragma once

#include "comm/shm_segment.h"

#include <fsdp/communicator.h>

#include <chrono>
#include <memory>

namespace fsdp::detail {

/// The communicator of all ranks of `segment`, through its memory. Each of them
/// makes it. A dead process, or a wait of more than `timeout`, aborts all.
std::shared_ptr<Communicator> make_shm_communicator(
    std::shared_ptr<ShmSegment> segment,
    std::chrono::milliseconds timeout);

} // namespace fsdp::detail
