#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// The limit of every wait: far more than anything here takes.
constexpr std::chrono::seconds kToolLimit(30);

/// Whether the condition became true in time.
bool becomes_true(const std::function<bool()>& condition);

/// The letter of the process's state, as in `ps`: 'S', 'T', ... or '-' when it
/// has ended, be it a zombie or gone.
char state_of(pid_t pid);

/// Whether the process has ended, or does in time.
bool ends(pid_t pid);

/// The path of the tool that this build has made.
std::string tool_path();

/// Whether `text` occurs in `in`, and how often.
int count_of(const std::string& text, const std::string& in);

/// All numbers that follow `name` and a space.
std::vector<pid_t> pids_after(const std::string& name, const std::string& text);

/// How a ToolProcess is to be started.
struct ToolSetup {
  std::string input = {}; // its stdin
  int stdout_fd = -1;     // instead of one that `out` reads
};

/// The tool as a child in a process group of its own; killed in the end.
class ToolProcess {
 public:
  explicit ToolProcess(
      const std::vector<std::string>& arguments,
      const ToolSetup& setup = {});
  ~ToolProcess();
  ToolProcess(const ToolProcess&) = delete;
  ToolProcess& operator=(const ToolProcess&) = delete;

  pid_t pid() const { return pid_; }
  /// What it has printed so far.
  std::string out() const;
  std::string err() const;
  /// Whether `text` is printed on stdout `times` times, or will be in time.
  bool prints(const std::string& text, int times = 1) const;

  /// To its process group, as Ctrl-C does.
  void signal(int signal) const;
  /// Its status as a shell shows it; -1 when it does not end in time.
  int wait();
  /// From start to the end of `wait`.
  double seconds() const { return seconds_; }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  bool ended_ = false;
  std::chrono::steady_clock::time_point start_;
  double seconds_ = 0;
};

/// The arguments of `fsdp run -n RANKS OPTIONS... -- sh -c SCRIPT`.
std::vector<std::string> run_script(
    int ranks,
    const std::string& script,
    const std::vector<std::string>& options = {});

} // namespace fsdp::detail
