#include "launch/output_multiplexer.h"

#include "launch/launch_error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace fsdp::detail {
namespace {

constexpr size_t kReadBytes = size_t{64} << 10;
constexpr int kReadsAtOnce = 4; // then the others have their turn
constexpr int kReadsAtEnd = 64; // more than any pipe holds

bool are_same_file(int a, int b) {
  struct stat status_a = {};
  struct stat status_b = {};
  return ::fstat(a, &status_a) == 0 && ::fstat(b, &status_b) == 0 &&
      status_a.st_dev == status_b.st_dev && status_a.st_ino == status_b.st_ino;
}

} // namespace

OutputMultiplexer::OutputMultiplexer(int ranks, int stdout_fd, int stderr_fd)
    : out_(stdout_fd),
      err_(stderr_fd),
      shared_(are_same_file(stdout_fd, stderr_fd)),
      last_lines_(static_cast<size_t>(ranks)) {
}

OutputMultiplexer::WriteEnds OutputMultiplexer::open(int rank) {
  UniqueFd out = open_stream(rank, out_);
  UniqueFd err = open_stream(rank, error_sink());
  return {std::move(out), std::move(err)};
}

UniqueFd OutputMultiplexer::open_stream(int rank, OutputSink& sink) {
  int ends[2] = {};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw system_error("cannot make a pipe", errno);
  }
  UniqueFd writer(ends[1]);
  streams_.push_back({rank, &sink, UniqueFd(ends[0]), LineSplitter()});
  // Of this end alone: the rank's writes wait as usual.
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return writer;
}

void OutputMultiplexer::append_to(std::vector<pollfd>& polled) const {
  for (const Stream& stream : streams_) {
    if (stream.reader && !stream.sink->full()) {
      polled.push_back({stream.reader.get(), POLLIN, 0});
    }
  }
  for (const OutputSink* sink : {&out_, &err_}) {
    if (sink->pending()) {
      polled.push_back({sink->fd(), POLLOUT, 0});
    }
  }
}

void OutputMultiplexer::serve() {
  for (Stream& stream : streams_) {
    for (int i = 0; i < kReadsAtOnce && !stream.sink->full(); ++i) {
      if (!read_some(stream)) {
        break;
      }
    }
  }
  out_.flush();
  err_.flush();
  for (Stream& stream : streams_) {
    if (stream.sink->closed()) {
      stream.reader.reset();
    }
  }
}

void OutputMultiplexer::finish() {
  for (Stream& stream : streams_) {
    for (int i = 0; i < kReadsAtEnd && read_some(stream); ++i) {}
    close(stream);
  }
  out_.flush();
  err_.flush();
}

bool OutputMultiplexer::is_flushed() const {
  return !out_.pending() && !err_.pending();
}

void OutputMultiplexer::print_error(std::string_view text) {
  error_sink().write(text);
  error_sink().flush();
}

const LastLines& OutputMultiplexer::last_lines(int rank) const {
  return last_lines_.at(static_cast<size_t>(rank));
}

// Whether there may be more now.
bool OutputMultiplexer::read_some(Stream& stream) {
  if (!stream.reader) {
    return false;
  }
  std::array<char, kReadBytes> buffer;
  const ssize_t bytes =
      ::read(stream.reader.get(), buffer.data(), buffer.size());
  if (bytes > 0) {
    stream.splitter.add(
        {buffer.data(), static_cast<size_t>(bytes)},
        [&](std::string_view line) { pass_on(stream, line); });
    return true;
  }
  if (bytes == 0) {
    close(stream);
  }
  return bytes < 0 && errno == EINTR;
}

void OutputMultiplexer::close(Stream& stream) {
  stream.reader.reset();
  stream.splitter.finish([&](std::string_view line) { pass_on(stream, line); });
}

void OutputMultiplexer::pass_on(const Stream& stream, std::string_view line) {
  std::string text = "[" + std::to_string(stream.rank) + "] ";
  text += line;
  if (!line.ends_with('\n') && !line.ends_with('\r')) {
    text += '\n'; // the next line may be another rank's
  }
  stream.sink->write(text);
  last_lines_[static_cast<size_t>(stream.rank)].add(line);
}

} // namespace fsdp::detail
