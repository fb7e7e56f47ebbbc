#include "launch/reserved_port.h"

#include "launch/launch_error.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

namespace fsdp::detail {

ReservedPort::ReservedPort()
    : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int on = 1;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  if (!socket_ ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
      ::bind(socket_.get(), generic, length) != 0 ||
      ::getsockname(socket_.get(), generic, &length) != 0) {
    throw system_error("cannot reserve a TCP port on 127.0.0.1", errno);
  }
  number_ = ntohs(address.sin_port);
}

} // namespace fsdp::detail
