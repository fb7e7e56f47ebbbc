#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace fsdp::testing {

using Variables = std::map<std::string, std::string>;
using Words = std::vector<std::string>;

/// What a process has written, and how it ended.
struct Ended {
  int status = -1; // of exit; 128 + signal; -1: killed, since it did not end
  std::string out;
  std::string err;
};

/// The environment is that of this process without what launchers set, and
/// `variables`.
struct Command {
  Words words; // the first is looked up in PATH
  Variables variables;
};

/// A process in a group of its own. At the end it is killed, with what it has
/// started.
class Process {
 public:
  /// Writes to the files `output`.out and `output`.err.
  Process(const Command& command, std::string output);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  /// Does nothing once it has ended.
  void signal(int number);
  bool has_ended();
  /// What it has written to stdout so far.
  std::string out() const;
  /// Kills it if it has not ended.
  Ended result();

 private:
  void kill_and_reap();

  std::string output_;
  pid_t pid_ = 0;
  bool has_ended_ = false;
  int status_ = -1;
};

/// Runs all at once and waits for them. What has not ended within `limit` is
/// killed, with what it has started.
std::vector<Ended> run_all(
    const std::vector<Command>& commands,
    std::chrono::milliseconds limit = std::chrono::seconds(60));

Ended run(
    const Command& command,
    std::chrono::milliseconds limit = std::chrono::seconds(60));

/// The program start_rank_program with these arguments, as `size` processes:
/// `variables(rank)` are those of a rank.
template <class F>
std::vector<Ended> run_ranks(
    int size,
    const Words& arguments,
    F&& variables,
    std::chrono::milliseconds limit = std::chrono::seconds(60));

/// In the folder of this test.
std::string rank_program();
std::string fsdp_tool();

/// Empty where it is not installed.
std::string path_of(const std::string& program);

/// A folder that is removed with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int free_port();

template <class F>
std::vector<Ended> run_ranks(
    int size,
    const Words& arguments,
    F&& variables,
    std::chrono::milliseconds limit) {
  std::vector<Command> commands;
  for (int rank = 0; rank < size; ++rank) {
    Words words = {rank_program()};
    words.insert(words.end(), arguments.begin(), arguments.end());
    commands.push_back({words, variables(rank)});
  }
  return run_all(commands, limit);
}

} // namespace fsdp::testing
