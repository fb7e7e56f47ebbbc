#include "launch/launcher.h"

#include "launch/descendants.h"
#include "launch/launch_error.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>

namespace fsdp::detail {
namespace {

// How long processes that have left the group of their rank may take to go.
constexpr std::chrono::milliseconds kSweep{500};

// Without them the first pipes would become the standard streams.
void open_standard_streams() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) {
    ::close(fd);
  }
}

LaunchOptions prepared(LaunchOptions options) {
  open_standard_streams();
  adopt_orphans();
  return options;
}

UniqueFd open_file(const std::string& path, int flags) {
  UniqueFd file(::open(path.c_str(), flags | O_CLOEXEC, 0666));
  if (!file) {
    throw system_error("cannot open '" + path + "'", errno);
  }
  return file;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw system_error(
        "cannot make the folder '" + folder + "'", error.value());
  }
}

int milliseconds_until(Ending::Time time) {
  const auto rest =
      std::chrono::ceil<std::chrono::milliseconds>(time - Ending::Clock::now());
  return static_cast<int>(std::max<long>(rest.count(), 0));
}

} // namespace

Launcher::Launcher(LaunchOptions options)
    : options_(prepared(std::move(options))),
      output_(options_.ranks, STDOUT_FILENO, STDERR_FILENO),
      ending_(options_.grace) {
}

int Launcher::run() {
  start_ranks();
  while (!all_have_ended() && !ending_.is_over(Clock::now())) {
    wait_for_events();
    take_signals();
    notice_ends();
    notice_stops();
    send_due_signals();
    output_.serve();
  }
  end_processes();
  output_.finish();
  report();
  flush_output();
  return exit_code();
}

void Launcher::start_ranks() {
  const std::vector<Cpu> cpus = allowed_cpus();
  const auto bindings = bind_ranks(options_.binding, cpus, options_.ranks);
  JobEnvironment job;
  job.job = new_job_name();
  job.ranks = options_.ranks;
  job.master_port = port_.number();
  job.threads = options_.threads;
  job.default_threads =
      std::max(static_cast<int>(cpus.size()) / options_.ranks, 1);
  job.backend = options_.backend;
  job.timeout_s = options_.timeout_s;
  if (options_.output == OutputMode::kFiles) {
    make_folder(options_.log_dir);
  }
  const std::vector<std::string> inherited = own_environment();
  for (int rank = 0; rank < options_.ranks; ++rank) {
    RankCommand command;
    command.program = options_.program;
    command.environment = rank_environment(inherited, job, rank);
    command.cpus = bindings[static_cast<size_t>(rank)];
    start_rank(rank, std::move(command));
  }
}

void Launcher::start_rank(int rank, RankCommand command) {
  UniqueFd input;
  if (rank > 0) {
    input = open_file("/dev/null", O_RDONLY);
    command.stdin_fd = input.get();
  }
  OutputMultiplexer::WriteEnds ends;
  if (options_.output == OutputMode::kPrefixed) {
    ends = output_.open(rank);
    command.stdout_fd = ends.out.get();
    command.stderr_fd = ends.err.get();
  } else if (options_.output == OutputMode::kFiles) {
    ends.out = open_file(log_of(rank), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
    command.stdout_fd = ends.out.get();
    command.stderr_fd = ends.out.get();
  }
  ranks_.push_back(
      std::make_unique<RankProcess>(rank, command, signals_, guard_));
  seen_.push_back(false);
}

std::string Launcher::log_of(int rank) const {
  return options_.log_dir + "/rank-" + std::to_string(rank) + ".log";
}

bool Launcher::all_have_ended() const {
  return std::find(seen_.begin(), seen_.end(), false) == seen_.end();
}

void Launcher::wait_for_events() {
  std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0}};
  output_.append_to(polled);
  const auto next = ending_.next();
  ::poll(polled.data(), polled.size(), next ? milliseconds_until(*next) : -1);
}

void Launcher::notice_ends() {
  const auto now = Clock::now();
  std::vector<FailedRank> failed;
  for (const auto& rank : ranks_) {
    const auto index = static_cast<size_t>(rank->rank());
    if (!seen_[index] && rank->has_ended()) {
      seen_[index] = true;
      if (!rank->status().ok()) {
        failed.push_back(
            {rank->rank(),
             rank->pid(),
             rank->status(),
             std::chrono::duration_cast<std::chrono::milliseconds>(
                 now - start_)});
      }
    }
  }
  // Of those that are noticed together, one that was killed is rather the cause
  // than one that has exited because a peer was gone.
  std::stable_partition(failed.begin(), failed.end(), [](const auto& rank) {
    return rank.status.signal != 0;
  });
  failed_.insert(failed_.end(), failed.begin(), failed.end());
  if (!failed.empty()) {
    ending_.rank_failed(now);
  }
}

void Launcher::notice_stops() {
  for (const auto& rank : ranks_) {
    const auto stop = rank->take_stop();
    if (!stop) {
      continue;
    }
    const bool wants_terminal = *stop == SIGTTIN || *stop == SIGTTOU;
    if (wants_terminal && terminal_.lend(rank->pid())) {
      rank->signal_group(SIGCONT);
    } else if (wants_terminal || terminal_.is_lent_to(rank->pid())) {
      suspend(); // the job is in the background, or the user has stopped it
    }
  }
}

void Launcher::send_due_signals() {
  if (const int signal = ending_.take_due(Clock::now())) {
    signal_groups(signal);
  }
}

void Launcher::take_signals() {
  bool child_ended = false;
  for (const int signal : signals_.take()) {
    child_ended |= signal == SIGCHLD;
    take_signal(signal);
  }
  if (child_ended) {
    reap_orphans([this](pid_t pid) {
      return pid == guard_.pid() ||
          std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
               return rank->pid() == pid;
             });
    });
  }
}

void Launcher::take_signal(int signal) {
  switch (signal) {
    case SIGCHLD:
      break; // all ranks are looked at after each wait
    case SIGUSR1:
    case SIGUSR2:
      // A helper of the program that does not know the signal would die of it.
      for (const auto& rank : ranks_) {
        rank->signal_program(signal);
      }
      break;
    case SIGTSTP:
      suspend();
      break;
    case SIGCONT:
      signal_groups(SIGCONT);
      break;
    default:
      request_end(signal);
  }
}

void Launcher::request_end(int signal) {
  const bool again = signal == SIGHUP && !request_.empty();
  // A terminal that goes away and its shell each send a SIGHUP.
  if (!again && ending_.requested(Clock::now())) {
    request_ = signal_name(signal);
    failed_before_request_ = !failed_.empty();
    signal_groups(signal);
  }
}

void Launcher::signal_groups(int signal) {
  for (const auto& rank : ranks_) {
    rank->signal_group(signal);
  }
}

// The ranks, then this process, as a shell expects of Ctrl-Z. The SIGCONT that
// wakes this process is passed on when it is read.
void Launcher::suspend() {
  signal_groups(SIGTSTP);
  terminal_.take_back();
  ::kill(::getpid(), SIGSTOP);
}

void Launcher::end_processes() {
  for (const auto& rank : ranks_) {
    if (!rank->reap()) {
      output_.print_error(
          "fsdp run: rank " + std::to_string(rank->rank()) + " (pid " +
          std::to_string(rank->pid()) +
          ") does not end, even by SIGKILL: a device or a file system may hold "
          "it.\n");
    }
  }
  kill_children(guard_.pid(), kSweep);
  terminal_.take_back();
}

int Launcher::exit_code() const {
  if (failed_.empty()) {
    return all_have_ended() ? 0 : 128 + SIGKILL;
  }
  return failed_.front().status.shell_code();
}

void Launcher::report() {
  if (failed_.empty()) {
    return;
  }
  const int first = failed_.front().rank;
  const bool in_file = options_.output == OutputMode::kFiles;
  const std::string log = in_file ? log_of(first) : std::string();
  output_.print_error(failure_report(
      failed_,
      in_file ? last_lines_of_file(log) : output_.last_lines(first),
      failed_before_request_ ? std::string() : request_,
      log));
}

// Whoever reads may take as long as it likes; a request to end is heard.
void Launcher::flush_output() {
  while (!output_.is_flushed()) {
    std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0}};
    output_.append_to(polled);
    ::poll(polled.data(), polled.size(), -1);
    for (const int signal : signals_.take()) {
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
        return;
      }
    }
    output_.serve();
  }
}

} // namespace fsdp::detail
