#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace fsdp::detail {

/// Cuts a stream of bytes into lines. A line ends with "\n", with "\r\n", or
/// with "\r" alone, as progress bars write it; a line that is too long is cut
/// into pieces without an end.
class LineSplitter {
 public:
  static constexpr size_t kLongestLine = size_t{64} << 10;

  /// Takes a line with its end.
  using Sink = std::function<void(std::string_view line)>;

  explicit LineSplitter(size_t longest_line = kLongestLine)
      : longest_line_(longest_line) {}

  void add(std::string_view bytes, const Sink& sink);

  /// Gives away what waits for its end.
  void finish(const Sink& sink);

 private:
  void add(char c, const Sink& sink);

  size_t longest_line_;
  std::string line_;
};

/// The line without its end.
std::string_view without_line_end(std::string_view line);

} // namespace fsdp::detail
