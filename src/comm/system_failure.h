#pragma once

#include <fsdp/communicator.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace fsdp::detail {

/// "memfd_create failed: Operation not permitted", by errno unless `error` is
/// given.
inline std::string system_failure(const std::string& call, int error = errno) {
  return call + " failed: " + std::generic_category().message(error);
}

/// Throws CommunicationError for a system call that shared memory needs.
[[noreturn]] inline void throw_system_failure(
    const std::string& call,
    int error = errno) {
  throw CommunicationError("shared memory: " + system_failure(call, error));
}

} // namespace fsdp::detail
