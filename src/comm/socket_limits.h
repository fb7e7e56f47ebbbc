#pragma once

#include <chrono>

namespace fsdp::detail {

/// Lets no read from, and no write to, a TCP connection of this process to port
/// `port` take longer than `limit`: libtorch's store has no limit for the
/// answer of a server that is stopped, nor a way to its sockets (seen in 2.11
/// to 2.15). Where a connection cannot be found it stays as it is.
void limit_connections_to(int port, std::chrono::milliseconds limit);

} // namespace fsdp::detail
