#pragma once

#include "comm/fork_hold.h"

#include <cstdint>

namespace fsdp::detail {

/// Owns a descriptor that no child inherits: it must be close-on-exec, and
/// forked children close it at once. There it counts as absent.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  /// Takes `descriptor`, which was made under `hold`; negative for none.
  FileDescriptor(const ForkHold& hold, int descriptor);
  ~FileDescriptor() { reset(); }
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  /// -1 when absent, which poll() ignores.
  int get() const;
  explicit operator bool() const { return get() >= 0; }

  void reset();

 private:
  int descriptor_ = -1;
  uint64_t generation_ = 0;
};

} // namespace fsdp::detail
