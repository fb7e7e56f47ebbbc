#include "launch/reserved_port.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <set>
#include <vector>

namespace fsdp::detail {
namespace {

// As the store of c10d does it: on all addresses, IPv4 and IPv6.
int listen_error(int port, bool reuse) {
  const UniqueFd socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = reuse ? 1 : 0;
  const int off = 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  address.sin6_port = htons(static_cast<uint16_t>(port));
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  const bool works = ::bind(socket.get(), generic, sizeof(address)) == 0 &&
      ::listen(socket.get(), 8) == 0;
  return works ? 0 : errno;
}

TEST(ReservedPort, IsFreeForAStoreAndForNobodyElse) {
  const ReservedPort port;
  EXPECT_GT(port.number(), 0);
  EXPECT_EQ(listen_error(port.number(), true), 0);
  EXPECT_EQ(listen_error(port.number(), false), EADDRINUSE);
}

TEST(ReservedPort, IsNotGivenTwice) {
  std::vector<ReservedPort> ports(100);
  std::set<int> numbers;
  for (const ReservedPort& port : ports) {
    numbers.insert(port.number());
  }
  EXPECT_EQ(numbers.size(), ports.size());
}

} // namespace
} // namespace fsdp::detail
