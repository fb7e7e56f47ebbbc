#pragma once

#include <stdexcept>
#include <string>

namespace fsdp::detail {

/// Why a job could not be started, and what the launcher exits with.
class LaunchError : public std::runtime_error {
 public:
  static constexpr int kFailure = 1;
  static constexpr int kCannotExecute = 126; // as shells have it
  static constexpr int kNotFound = 127;

  explicit LaunchError(const std::string& message, int exit_code = kFailure)
      : std::runtime_error(message),
        exit_code_(exit_code) {}

  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// A LaunchError of a system call: "`what`: the text of `error`".
LaunchError system_error(const std::string& what, int error);

} // namespace fsdp::detail
