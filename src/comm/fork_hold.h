#pragma once

#include <cstdint>

namespace fsdp::detail {

/// How many forks lie between the process that loaded the library and this one.
/// What a process has made differs from what it has inherited by this number.
uint64_t fork_generation();

/// While it lives no other thread forks, so that a descriptor or a mapping can
/// be made and kept from children in one go. Hold it for calls that do not
/// wait, and destroy no FileDescriptor within.
class ForkHold {
 public:
  ForkHold();
  ~ForkHold();
  ForkHold(const ForkHold&) = delete;
  ForkHold& operator=(const ForkHold&) = delete;

  /// A forked child closes `descriptor` before it does anything else.
  void close_in_children(int descriptor) const;
  void forget(int descriptor) const;
};

} // namespace fsdp::detail
