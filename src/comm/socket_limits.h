#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fsdp::detail {

/// Lets no read from, and no write to, a TCP connection of this process to port
/// `port` take longer than `limit`: libtorch's store has no limit for the
/// answer of a server that is stopped, nor a way to its sockets (seen in 2.11
/// to 2.15). Where a connection cannot be found it stays as it is.
void limit_connections_to(int port, std::chrono::milliseconds limit);

/// While one lives for longer than `limit`, it ends the connections of this
/// process to `port`: whoever reads from them gets an error. For calls that
/// make a connection and wait for its first answer.
class ConnectionDeadline {
 public:
  ConnectionDeadline(int port, std::chrono::milliseconds limit);
  ~ConnectionDeadline();
  ConnectionDeadline(const ConnectionDeadline&) = delete;
  ConnectionDeadline& operator=(const ConnectionDeadline&) = delete;

 private:
  std::mutex mutex_; // guards is_over_
  std::condition_variable over_;
  bool is_over_ = false;
  std::thread thread_;
};

} // namespace fsdp::detail
