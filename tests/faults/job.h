#pragma once

#include "start/processes.h"

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing {

/// A job of the program fault_rank. Its ranks say, each a line:
///
///   starts                      all ranks have loaded
///   trains                      a step was complete
///   is at its fate              the victim waits for the file "strike"
///   struck MS                   it takes the signal
///   failed MS WHERE: TEXT       the error of the rank
///   again TEXT                  that of the next call of the net
///   left N descriptors, M views   of shared memory, once all objects are gone
struct JobOptions {
  std::string backend;
  int size = 2;
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  Words arguments; // mode first
  Variables variables = {};
};

/// The processes of a job, started by hand. They are killed at the end.
class Job {
 public:
  explicit Job(const JobOptions& options);

  int size() const { return static_cast<int>(ranks_.size()); }
  Process& rank(int rank) { return *ranks_.at(static_cast<size_t>(rank)); }
  /// For files of the job; the ranks have it as their folder for temporary
  /// files, too.
  const std::string& folder() const { return folder_.path(); }
  std::vector<pid_t> pids() const;

  /// Waits until the rank has said a line that begins like that.
  bool await_line(int rank, const std::string& lead);
  /// Lets ranks go on that wait for the file `name`.
  void make_file(const std::string& name) const;
  /// Waits until the rank has ended; returns false when that takes too long.
  bool await_end(int rank, std::chrono::milliseconds limit);

 private:
  TemporaryFolder folder_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

/// Runs a job to its end: each rank ends with `status` and has said a line in
/// which the regular expression `pattern` is found.
void expect_job(
    const JobOptions& options,
    int status,
    const std::string& pattern);

/// Status of a rank after an error that names a failure of the job.
constexpr int kStatusOfFailed = 3;

/// The rest of the line of `out` that begins with `lead`; empty if there is
/// none.
std::string line_after(const std::string& out, const std::string& lead);

/// Polls until `is_so` or the limit is over. Returns whether it is so.
bool eventually(
    const std::function<bool()>& is_so,
    std::chrono::milliseconds limit);

/// What the processes of a job had at one time that could outlive them.
class Leavings {
 public:
  /// Looks at them while they run.
  void note(const Job& job);
  /// Expects that nothing of what was noted is there any more, no process that
  /// `job` has started, and no file.
  void expect_none(const Job& job) const;

 private:
  std::set<std::string> memory_;  // inodes of shared memory
  std::set<std::string> sockets_; // inodes of Unix domain sockets
};

} // namespace fsdp::testing
