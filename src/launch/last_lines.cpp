#include "launch/last_lines.h"

#include "launch/line_splitter.h"

#include <algorithm>
#include <fstream>

namespace fsdp::detail {
namespace {

constexpr std::streamoff kTailBytes = std::streamoff{64} << 10;

} // namespace

void LastLines::add(std::string_view line) {
  if (replace_last_) {
    lines_.pop_back();
  }
  replace_last_ = line.ends_with('\r');
  const std::string_view text = without_line_end(line);
  lines_.emplace_back(text.substr(0, kLongest));
  if (text.size() > kLongest) {
    lines_.back() += " ...";
  }
  if (lines_.size() > kCount) {
    lines_.pop_front();
  }
}

LastLines last_lines_of_file(const std::string& path) {
  LastLines result;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    return result;
  }
  const auto bytes = std::min<std::streamoff>(file.tellg(), kTailBytes);
  file.seekg(-bytes, std::ios::end);
  std::string tail(static_cast<size_t>(bytes), '\0');
  file.read(tail.data(), bytes);
  tail.resize(static_cast<size_t>(file.gcount()));

  LineSplitter splitter;
  const auto keep = [&](std::string_view line) { result.add(line); };
  splitter.add(tail, keep);
  splitter.finish(keep);
  return result;
}

} // namespace fsdp::detail
