#pragma once

#include <cstdint>
#include <string>

namespace fsdp::detail {

enum class LogLevel : uint8_t { kOff, kInfo, kDebug };

/// Writes lines to stderr as LIBFSDP_LOG asks for: "fsdp rank 0/2: ...". A
/// value; each world has its own.
class Log {
 public:
  Log() = default; // off
  Log(LogLevel level, int rank, int size);

  /// For what the job does as a whole: rank 0 alone writes it.
  void info(const std::string& text) const;

  /// For what each rank does.
  void debug(const std::string& text) const;

 private:
  void write(const std::string& text) const;

  LogLevel level_ = LogLevel::kOff;
  int rank_ = 0;
  int size_ = 1;
};

} // namespace fsdp::detail
