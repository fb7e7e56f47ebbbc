#pragma once

#include "comm/file_descriptor.h"

#include <sys/types.h>

#include <string>

namespace fsdp::detail {

/// The process of a rank of this host, by a handle that stays right when its
/// pid is given to another process.
class PeerProcess {
 public:
  PeerProcess() = default;
  /// `pid` is for messages; 0 when it is not known.
  PeerProcess(pid_t pid, FileDescriptor handle);

  pid_t pid() const { return pid_; }
  const FileDescriptor& handle() const { return handle_; }

  /// Whether it has ended, even if its parent has not yet asked how. Never
  /// waits.
  bool ended() const;

  /// "pid 4711", "pid 4711, stopped", "pid 4711, dead".
  std::string text() const;

 private:
  pid_t pid_ = 0;
  FileDescriptor handle_;
};

/// "pid 4711".
std::string pid_text(pid_t pid);

} // namespace fsdp::detail
