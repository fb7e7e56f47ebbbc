#pragma once

#include "launch/last_lines.h"
#include "launch/line_splitter.h"
#include "launch/output_sink.h"
#include "launch/unique_fd.h"

#include <poll.h>

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

/// Passes on what the ranks write, line by line with the rank before each, and
/// remembers the last lines of each rank. Nothing here waits.
///
/// A rank is held up when nobody takes what it writes, and its stream is closed
/// when the reader has gone, as if it wrote there itself.
class OutputMultiplexer {
 public:
  OutputMultiplexer(int ranks, int stdout_fd, int stderr_fd);
  OutputMultiplexer(const OutputMultiplexer&) = delete;
  OutputMultiplexer& operator=(const OutputMultiplexer&) = delete;

  /// What a rank is to have as stdout and stderr.
  struct WriteEnds {
    UniqueFd out;
    UniqueFd err;
  };
  WriteEnds open(int rank);

  /// What to wait for.
  void append_to(std::vector<pollfd>& polled) const;
  /// Moves what can be moved now.
  void serve();
  /// Takes the rest when all ranks have ended.
  void finish();
  /// Whether everything that was taken is written.
  bool is_flushed() const;

  /// A line of the launcher's own on stderr.
  void print_error(std::string_view text);

  const LastLines& last_lines(int rank) const;

 private:
  struct Stream {
    int rank;
    OutputSink* sink;
    UniqueFd reader;
    LineSplitter splitter;
  };

  UniqueFd open_stream(int rank, OutputSink& sink);
  bool read_some(Stream& stream);
  void close(Stream& stream);
  void pass_on(const Stream& stream, std::string_view line);
  OutputSink& error_sink() { return shared_ ? out_ : err_; }

  OutputSink out_;
  OutputSink err_;
  bool shared_; // stdout and stderr are one; so is then what waits for them
  std::vector<Stream> streams_;
  std::vector<LastLines> last_lines_; // by rank
};

} // namespace fsdp::detail
