#include "comm/socket_limits.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <charconv>
#include <filesystem>
#include <string>
#include <system_error>

namespace fsdp::detail {
namespace {

/// The port at the other end, or -1 where `fd` is no TCP connection.
int peer_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return -1;
  }
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  return -1;
}

void limit_connection(int fd, std::chrono::milliseconds limit) {
  timeval time{};
  time.tv_sec = limit.count() / 1000;
  time.tv_usec = limit.count() % 1000 * 1000;
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
}

template <class F>
void each_connection_to(int port, F&& visit) {
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename().string();
    int fd = -1;
    const auto [end, failure] =
        std::from_chars(name.data(), name.data() + name.size(), fd);
    if (failure == std::errc() && peer_port(fd) == port) {
      visit(fd);
    }
  }
}

} // namespace

void limit_connections_to(int port, std::chrono::milliseconds limit) {
  each_connection_to(port, [&](int fd) { limit_connection(fd, limit); });
}

ConnectionDeadline::ConnectionDeadline(
    int port,
    std::chrono::milliseconds limit)
    : thread_([this, port, limit] {
        // The other side tries again, perhaps.
        constexpr std::chrono::milliseconds kAgain(50);
        auto wait = limit;
        std::unique_lock lock(mutex_);
        while (!over_.wait_for(lock, wait, [this] { return is_over_; })) {
          each_connection_to(port, [](int fd) { shutdown(fd, SHUT_RDWR); });
          wait = kAgain;
        }
      }) {
}

ConnectionDeadline::~ConnectionDeadline() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  over_.notify_one();
  thread_.join();
}

} // namespace fsdp::detail
