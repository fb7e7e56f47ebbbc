#pragma once

#include "comm/shm_communicator.h"
#include "comm/thread_world.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

namespace fsdp::detail {

/// A world over memory that its ranks share, though they are threads.
JoinWorld make_world_of_shm(
    int size,
    std::chrono::milliseconds timeout,
    size_t segment_bytes = size_t{4} << 30);

} // namespace fsdp::detail
