#pragma once

#include "launch/unique_fd.h"

namespace fsdp::detail {

/// A free TCP port of this host for the store of a job. The socket stays bound,
/// but does not listen, so the system gives the port to nobody who asks for any
/// free one; rank 0 can listen on it, as stores set SO_REUSEADDR.
class ReservedPort {
 public:
  ReservedPort();

  int number() const { return number_; }

 private:
  UniqueFd socket_;
  int number_ = 0;
};

} // namespace fsdp::detail
