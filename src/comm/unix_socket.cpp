#include "comm/unix_socket.h"

#include "comm/system_failure.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace fsdp::detail {
namespace {

constexpr int kBacklog = 1024;
constexpr size_t kMostBytes = 8192; // of a message
constexpr int kSoPeerPidfd = 77;    // SO_PEERPIDFD, Linux 6.5

struct AbstractAddress {
  explicit AbstractAddress(const std::string& name) {
    // The first byte stays 0: that makes the name abstract.
    if (name.size() + 1 > sizeof address.sun_path) {
      throw std::invalid_argument(
          "shared memory: socket name '" + name + "' is too long");
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    length = static_cast<socklen_t>(
        offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&address);
  }

  sockaddr_un address{};
  socklen_t length = 0;
};

using ControlBuffer =
    std::array<char, CMSG_SPACE(sizeof(int) * UnixSocket::kMostDescriptors)>;

void attach(
    msghdr& message,
    ControlBuffer& control,
    std::span<const int> descriptors) {
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
}

void take_descriptors(
    const ForkHold& hold,
    msghdr& message,
    std::vector<FileDescriptor>& out) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(
          &descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      out.emplace_back(hold, descriptor);
    }
  }
}

bool is_would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

} // namespace

UnixSocket UnixSocket::make() {
  const int type = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;
  const auto open = [] {
    const ForkHold hold;
    return FileDescriptor(hold, ::socket(AF_UNIX, type, 0));
  };
  UnixSocket socket(open());
  if (!socket.socket_) {
    throw_system_failure("socket(AF_UNIX)");
  }
  return socket;
}

std::optional<UnixSocket> UnixSocket::listen(const std::string& name) {
  const AbstractAddress address(name);
  UnixSocket socket = make();
  if (::bind(socket.descriptor(), address.get(), address.length) != 0) {
    if (errno == EADDRINUSE) {
      return std::nullopt;
    }
    throw_system_failure("bind to '@" + name + "'");
  }
  if (::listen(socket.descriptor(), kBacklog) != 0) {
    throw_system_failure("listen at '@" + name + "'");
  }
  return socket;
}

std::optional<UnixSocket> UnixSocket::connect(const std::string& name) {
  const AbstractAddress address(name);
  UnixSocket socket = make();
  if (::connect(socket.descriptor(), address.get(), address.length) == 0) {
    return socket;
  }
  if (errno == ECONNREFUSED || errno == EINTR || is_would_block(errno)) {
    return std::nullopt;
  }
  throw_system_failure("connect to '@" + name + "'");
}

std::optional<UnixSocket> UnixSocket::accept() {
  const auto next = [this] {
    const ForkHold hold;
    return FileDescriptor(
        hold,
        ::accept4(
            descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  };
  FileDescriptor socket = next();
  if (socket) {
    return UnixSocket(std::move(socket));
  }
  if (is_would_block(errno) || errno == ECONNABORTED || errno == EINTR) {
    return std::nullopt;
  }
  throw_system_failure("accept");
}

void UnixSocket::stop_listening() {
  ::shutdown(descriptor(), SHUT_RDWR);
  socket_.reset();
}

UnixSocket::SendResult UnixSocket::send(
    std::string_view bytes,
    std::span<const int> descriptors) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) ControlBuffer control{};
  if (!descriptors.empty()) {
    attach(message, control, descriptors);
  }
  if (::sendmsg(descriptor(), &message, MSG_NOSIGNAL) >= 0) {
    return SendResult::kSent;
  }
  // ETOOMANYREFS: the limit on descriptors under way, until others read theirs.
  if (is_would_block(errno) || errno == EINTR || errno == ETOOMANYREFS ||
      errno == ENOBUFS) {
    return SendResult::kBusy;
  }
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) {
    return SendResult::kClosed;
  }
  throw_system_failure("sendmsg");
}

UnixSocket::ReceiveResult UnixSocket::receive(Packet& packet) {
  packet.bytes.resize(kMostBytes);
  packet.descriptors.clear();
  packet.descriptors.reserve(kMostDescriptors);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t count = 0;
  {
    const ForkHold hold;
    count = ::recvmsg(descriptor(), &message, MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == ECONNRESET) {
      // Said once, and before what the other end had sent.
      count = ::recvmsg(descriptor(), &message, MSG_CMSG_CLOEXEC);
    }
    if (count > 0) {
      take_descriptors(hold, message, packet.descriptors);
    }
  }
  if (count < 0 && (is_would_block(errno) || errno == EINTR)) {
    return ReceiveResult::kNothing;
  }
  if (count < 0 && errno != ECONNRESET) {
    throw_system_failure("recvmsg");
  }
  if (count > 0 && (message.msg_flags & MSG_CTRUNC) != 0) {
    throw CommunicationError(
        "shared memory: not all descriptors arrived: this process has too many "
        "open files. Raise the limit (ulimit -n).");
  }
  packet.bytes.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return count > 0 ? ReceiveResult::kPacket : ReceiveResult::kClosed;
}

PeerCredentials UnixSocket::peer_credentials() const {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(
          descriptor(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    throw_system_failure("getsockopt(SO_PEERCRED)");
  }
  return {credentials.pid, credentials.uid};
}

FileDescriptor UnixSocket::peer_process() const {
  const auto open = [this] {
    const ForkHold hold;
    int process = -1;
    socklen_t length = sizeof process;
    const int result =
        ::getsockopt(descriptor(), SOL_SOCKET, kSoPeerPidfd, &process, &length);
    return FileDescriptor(hold, result == 0 ? process : -1);
  };
  FileDescriptor process = open();
  if (process || errno == ESRCH || errno == EINVAL) {
    return process; // EINVAL: it has ended and was waited for
  }
  return open_process(peer_credentials().pid);
}

FileDescriptor open_process(pid_t pid) {
  const auto open = [pid] {
    const ForkHold hold;
    return FileDescriptor(
        hold, static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  };
  FileDescriptor process = open();
  if (!process && errno != ESRCH) {
    throw_system_failure("pidfd_open of pid " + std::to_string(pid));
  }
  return process;
}

} // namespace fsdp::detail
