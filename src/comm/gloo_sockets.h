#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::detail {

/// A socket of this process. The number is given to another file once the
/// socket is closed, the inode is not.
struct OwnSocket {
  int descriptor = -1;
  uint64_t inode = 0;

  bool operator==(const OwnSocket&) const = default;
};

/// Keeps the TCP sockets that are made while it lives from the children of this
/// process: they are closed on exec, and first of all in a fork. Otherwise a
/// child that outlives this process would hold its connections, and hide its
/// death from the peers. A child that is forked before the end of this scope
/// still inherits them.
///
/// For sockets of a library that hands none of them out and may close them at
/// any time. One that another thread makes in these milliseconds counts as
/// well, if it is not closed on exec, and sends without delay, or listens.
class PrivateSockets {
 public:
  PrivateSockets();
  ~PrivateSockets();

  PrivateSockets(const PrivateSockets&) = delete;
  PrivateSockets& operator=(const PrivateSockets&) = delete;

 private:
  std::vector<OwnSocket> before_;
};

} // namespace fsdp::detail
