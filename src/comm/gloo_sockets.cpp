#include "comm/gloo_sockets.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>

namespace fsdp::detail {
namespace {

struct SocketRegistry {
  std::mutex mutex; // a fork waits for it
  std::vector<OwnSocket> sockets;
};

// Never destroyed: a static object may fork in its destructor.
SocketRegistry& socket_registry() {
  static SocketRegistry& registry = *new SocketRegistry;
  return registry;
}

/// Safe in the child of a process with threads.
bool is_open(const OwnSocket& socket) {
  struct stat status {};
  return ::fstat(socket.descriptor, &status) == 0 && S_ISSOCK(status.st_mode) &&
      status.st_ino == socket.inode;
}

void lock_sockets() {
  socket_registry().mutex.lock();
}

void unlock_sockets() {
  socket_registry().mutex.unlock();
}

// Only what is safe in the child of a process with threads: no allocation.
void close_sockets_in_child() {
  for (const OwnSocket& socket : socket_registry().sockets) {
    if (is_open(socket)) {
      ::close(socket.descriptor);
    }
  }
  socket_registry().sockets.clear();
  unlock_sockets();
}

void close_sockets_in_forks() {
  static const int error =
      ::pthread_atfork(&lock_sockets, &unlock_sockets, &close_sockets_in_child);
  if (error != 0) {
    throw std::system_error(error, std::generic_category(), "pthread_atfork");
  }
}

std::optional<OwnSocket> socket_at(const std::string& name) {
  OwnSocket socket;
  const auto [end, failure] = std::from_chars(
      name.data(), name.data() + name.size(), socket.descriptor);
  struct stat status {};
  if (failure != std::errc() || ::fstat(socket.descriptor, &status) != 0 ||
      !S_ISSOCK(status.st_mode)) {
    return std::nullopt;
  }
  socket.inode = status.st_ino;
  return socket;
}

std::vector<OwnSocket> own_sockets() {
  std::vector<OwnSocket> sockets;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd", error)) {
    if (const auto socket = socket_at(entry.path().filename().string())) {
      sockets.push_back(*socket);
    }
  }
  return sockets;
}

int option_of(const OwnSocket& socket, int level, int option) {
  int value = 0;
  socklen_t length = sizeof(value);
  const int status =
      ::getsockopt(socket.descriptor, level, option, &value, &length);
  return status == 0 ? value : 0;
}

bool is_to_be_private(const OwnSocket& socket) {
  const int flags = ::fcntl(socket.descriptor, F_GETFD);
  return flags >= 0 && (flags & FD_CLOEXEC) == 0 &&
      option_of(socket, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP &&
      (option_of(socket, IPPROTO_TCP, TCP_NODELAY) != 0 ||
       option_of(socket, SOL_SOCKET, SO_ACCEPTCONN) != 0);
}

} // namespace

PrivateSockets::PrivateSockets() : before_(own_sockets()) {
  close_sockets_in_forks();
}

PrivateSockets::~PrivateSockets() {
  const auto now = own_sockets();
  SocketRegistry& registry = socket_registry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(
      registry.sockets, [](const auto& each) { return !is_open(each); });
  for (const OwnSocket& socket : now) {
    const bool is_new =
        std::find(before_.begin(), before_.end(), socket) == before_.end();
    if (is_new && is_to_be_private(socket)) {
      ::fcntl(socket.descriptor, F_SETFD, FD_CLOEXEC);
      registry.sockets.push_back(socket);
    }
  }
}

} // namespace fsdp::detail
