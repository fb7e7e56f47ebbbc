#include "launch/line_splitter.h"

namespace fsdp::detail {

void LineSplitter::add(std::string_view bytes, const Sink& sink) {
  for (const char c : bytes) {
    add(c, sink);
  }
}

void LineSplitter::add(char c, const Sink& sink) {
  const bool after_return = !line_.empty() && line_.back() == '\r';
  if (after_return && c != '\n') {
    finish(sink);
  }
  // The end of a line stays with the line, be it as long as it may.
  if (line_.size() >= longest_line_ && c != '\n' && c != '\r') {
    finish(sink);
  }
  line_.push_back(c);
  if (c == '\n') {
    finish(sink);
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (!line_.empty()) {
    sink(line_);
    line_.clear();
  }
}

std::string_view without_line_end(std::string_view line) {
  const size_t last = line.find_last_not_of("\r\n");
  return last == std::string_view::npos ? std::string_view()
                                        : line.substr(0, last + 1);
}

} // namespace fsdp::detail
