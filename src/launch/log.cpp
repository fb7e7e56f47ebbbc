#include "launch/log.h"

#include <unistd.h>

namespace fsdp::detail {

Log::Log(LogLevel level, int rank, int size)
    : level_(level),
      rank_(rank),
      size_(size) {
}

void Log::info(const std::string& text) const {
  if (level_ != LogLevel::kOff && rank_ == 0) {
    write(text);
  }
}

void Log::debug(const std::string& text) const {
  if (level_ == LogLevel::kDebug) {
    write(text);
  }
}

void Log::write(const std::string& text) const {
  // One call per line, so that lines of several ranks do not mix.
  const std::string line = "fsdp rank " + std::to_string(rank_) + "/" +
      std::to_string(size_) + ": " + text + "\n";
  const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  static_cast<void>(written); // a log that can not be written is no error
}

} // namespace fsdp::detail
