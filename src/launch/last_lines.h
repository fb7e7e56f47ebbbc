#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace fsdp::detail {

/// Remembers the last lines of a rank, for the report of its failure.
class LastLines {
 public:
  static constexpr size_t kCount = 20;
  static constexpr size_t kLongest = 1000; // of what is kept of a line

  /// Takes a line with its end; one that ends with "\r" is replaced by the
  /// next.
  void add(std::string_view line);

  /// Without their ends.
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;
  bool replace_last_ = false;
};

/// The last lines of a file; none where it cannot be read.
LastLines last_lines_of_file(const std::string& path);

} // namespace fsdp::detail
