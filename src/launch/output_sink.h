#pragma once

#include "launch/unique_fd.h"

#include <string>
#include <string_view>

namespace fsdp::detail {

/// Writes to a stream that may take no bytes for a while, such as a pager or a
/// stopped terminal, and never waits for it.
class OutputSink {
 public:
  explicit OutputSink(int fd);

  /// Takes the text at once; it goes out as fast as the stream takes it.
  void write(std::string_view text);
  /// Writes what the stream takes now.
  void flush();

  /// The descriptor to wait for when there is something pending.
  int fd() const { return fd_; }
  bool pending() const { return !queue_.empty(); }
  /// Nothing more should be written for now.
  bool full() const;
  /// Nobody reads any more; what is written is dropped.
  bool closed() const { return closed_; }

 private:
  bool accepts_bytes() const;

  UniqueFd own_;
  int fd_;
  std::string queue_;
  bool closed_ = false;
};

} // namespace fsdp::detail
