#pragma once

#include "comm/c10d_backend.h"
#include "comm/gloo_communicator.h"

#include <chrono>

namespace fsdp::detail {

/// Makes Gloo back ends, all over one device: one listening socket and one I/O
/// thread for the rank. Every back end has a connection to each peer and two
/// threads. Throws CommunicationError when there is no such interface.
C10dBackendFactory gloo_factory(
    std::chrono::milliseconds timeout,
    GlooInterface interface);

} // namespace fsdp::detail
