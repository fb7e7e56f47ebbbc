#pragma once

#include "launch/cpu_binding.h"
#include "launch/ending.h"
#include "launch/failure_report.h"
#include "launch/job_environment.h"
#include "launch/output_multiplexer.h"
#include "launch/rank_guard.h"
#include "launch/rank_process.h"
#include "launch/reserved_port.h"
#include "launch/signal_watch.h"
#include "launch/terminal_loan.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Where the output of the ranks goes.
enum class OutputMode {
  kPrefixed,  // to the launcher's own, line by line, with the rank before each
  kInherited, // the ranks write to the launcher's own themselves
  kFiles,     // to one file per rank
};

struct LaunchOptions {
  std::vector<std::string> program = {}; // and its arguments
  int ranks = 1;
  std::optional<int> threads = std::nullopt;
  Binding binding = Binding::kAuto;
  OutputMode output = OutputMode::kPrefixed;
  std::string log_dir = {}; // for kFiles
  std::chrono::milliseconds grace{5000};
  std::optional<std::string> backend = std::nullopt;
  std::optional<std::string> timeout_s = std::nullopt;
};

/// Runs a job: starts its ranks, waits for them, passes output and signals on,
/// and ends all when one has failed. It uses signals, children and the terminal
/// of the whole process, which must have one thread.
class Launcher {
 public:
  /// Throws LaunchError for what cannot be prepared.
  explicit Launcher(LaunchOptions options);

  /// Returns 0 when all ranks did, else what a shell would show for the rank
  /// that failed first. Throws LaunchError when a rank cannot be started; the
  /// others are ended then.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  void start_ranks();
  void start_rank(int rank, RankCommand command);
  std::string log_of(int rank) const;

  bool all_have_ended() const;
  void wait_for_events();
  void notice_ends();
  void notice_stops();
  void send_due_signals();

  void take_signals();
  void take_signal(int signal);
  void request_end(int signal);
  void signal_groups(int signal);
  void suspend();

  void end_processes();
  int exit_code() const;
  void report();
  void flush_output();

  LaunchOptions options_;
  SignalWatch signals_;
  RankGuard guard_; // has none of what is opened below
  ReservedPort port_;
  TerminalLoan terminal_;
  OutputMultiplexer output_;
  Ending ending_;
  Clock::time_point start_ = Clock::now();
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::vector<bool> seen_;         // by rank: its end was noticed
  std::vector<FailedRank> failed_; // in the order of time
  std::string request_;            // the signal by which the user ends the job
  bool failed_before_request_ = false;
};

} // namespace fsdp::detail
