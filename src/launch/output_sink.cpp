#include "launch/output_sink.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace fsdp::detail {
namespace {

constexpr size_t kFullBytes = size_t{1} << 20;

// A description of its own, as O_NONBLOCK on the one that was inherited would
// reach all who share it, the user's shell among them.
UniqueFd reopen_without_waiting(int fd) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0 ||
      !(S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode))) {
    return UniqueFd();
  }
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return UniqueFd(
      ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
}

} // namespace

OutputSink::OutputSink(int fd)
    : own_(reopen_without_waiting(fd)),
      fd_(own_ ? own_.get() : fd) {
}

void OutputSink::write(std::string_view text) {
  if (!closed_) {
    queue_ += text;
  }
}

void OutputSink::flush() {
  size_t written = 0;
  while (written < queue_.size() && accepts_bytes()) {
    // A pipe that is ready for writing takes as many without waiting.
    const size_t count = std::min<size_t>(queue_.size() - written, PIPE_BUF);
    const ssize_t result = ::write(fd_, queue_.data() + written, count);
    if (result >= 0) {
      written += static_cast<size_t>(result);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      closed_ = true;
      written = queue_.size();
    }
  }
  queue_.erase(0, written);
}

bool OutputSink::accepts_bytes() const {
  pollfd poller{fd_, POLLOUT, 0};
  return own_ || ::poll(&poller, 1, 0) == 1;
}

bool OutputSink::full() const {
  return queue_.size() >= kFullBytes;
}

} // namespace fsdp::detail
