#include "launch/rank_process.h"

#include "launch/cpu_binding.h"
#include "launch/launch_error.h"
#include "launch/unique_fd.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

namespace fsdp::detail {
namespace {

constexpr std::chrono::seconds kLongestDeath(2);

// What a child could not do, for its parent.
struct ChildError {
  enum Step : int { kPrepare, kBind, kExecute };
  Step step = kPrepare;
  int error = 0;
};

// All that a child needs: it must not allocate, as a child of a program with
// threads must not.
struct ChildPlan {
  const RankCommand& command;
  const SignalWatch& signals;
  std::vector<char*> arguments;
  std::vector<char*> environment;
  pid_t launcher;
  int error_fd;
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) {
    result.push_back(const_cast<char*>(text.c_str())); // exec changes nothing
  }
  result.push_back(nullptr);
  return result;
}

[[noreturn]] void
give_up(const ChildPlan& plan, ChildError::Step step, int error) {
  const ChildError report{step, error};
  [[maybe_unused]] const ssize_t sent =
      ::write(plan.error_fd, &report, sizeof(report));
  ::_exit(LaunchError::kNotFound);
}

[[noreturn]] void become_rank(const ChildPlan& plan) {
  const RankCommand& command = plan.command;
  if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    give_up(plan, ChildError::kPrepare, errno);
  }
  if (::getppid() != plan.launcher) {
    ::_exit(0); // it died before the request to die with it
  }
  if (!command.cpus.empty()) {
    if (const int error = set_affinity(command.cpus)) {
      give_up(plan, ChildError::kBind, error);
    }
  }
  if (::dup2(command.stdin_fd, STDIN_FILENO) < 0 ||
      ::dup2(command.stdout_fd, STDOUT_FILENO) < 0 ||
      ::dup2(command.stderr_fd, STDERR_FILENO) < 0) {
    give_up(plan, ChildError::kPrepare, errno);
  }
  plan.signals.restore();
  ::execvpe(
      plan.arguments.front(), plan.arguments.data(), plan.environment.data());
  give_up(plan, ChildError::kExecute, errno);
}

std::string reason_not_found(const std::string& program) {
  if (program.find('/') == std::string::npos) {
    const std::string here = "./" + program;
    return "it is not in PATH." +
        (::access(here.c_str(), X_OK) == 0 ? " Did you mean '" + here + "'?"
                                           : std::string());
  }
  return ::access(program.c_str(), F_OK) == 0
      ? "its interpreter (see its first line) does not exist."
      : "there is no such file.";
}

LaunchError start_error(const RankCommand& command, const ChildError& error) {
  const std::string& program = command.program.front();
  const std::string what = "cannot start '" + program + "'";
  switch (error.step) {
    case ChildError::kPrepare:
      break;
    case ChildError::kBind:
      return system_error(what + ": binding it to its processors", error.error);
    case ChildError::kExecute:
      if (error.error == ENOENT) {
        return LaunchError(
            what + ": " + reason_not_found(program), LaunchError::kNotFound);
      }
      return LaunchError(
          system_error(what, error.error).what(), LaunchError::kCannotExecute);
  }
  return system_error(what, error.error);
}

ExitStatus status_of(const siginfo_t& info) {
  ExitStatus status;
  (info.si_code == CLD_EXITED ? status.exit_code : status.signal) =
      info.si_status;
  status.dumped_core = info.si_code == CLD_DUMPED;
  return status;
}

siginfo_t look_at(pid_t pid, int flags) {
  siginfo_t info = {};
  if (::waitid(P_PID, static_cast<id_t>(pid), &info, flags | WNOHANG) != 0) {
    info.si_pid = 0;
  }
  return info;
}

} // namespace

RankProcess::RankProcess(
    int rank,
    const RankCommand& command,
    const SignalWatch& signals,
    RankGuard& guard)
    : rank_(rank),
      guard_(guard) {
  int ends[2] = {};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw system_error("cannot make a pipe", errno);
  }
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  const ChildPlan plan{
      command,
      signals,
      pointers(command.program),
      pointers(command.environment),
      ::getpid(),
      writer.get()};
  pid_ = ::fork();
  if (pid_ < 0) {
    throw system_error("cannot start a process", errno);
  }
  if (pid_ == 0) {
    become_rank(plan);
  }
  writer.reset();
  ChildError error;
  if (::read(reader.get(), &error, sizeof(error)) == sizeof(error)) {
    ::waitpid(pid_, nullptr, 0);
    throw start_error(command, error);
  }
  guard_.watch(pid_);
}

RankProcess::~RankProcess() {
  reap();
}

bool RankProcess::has_ended() {
  if (!status_) {
    const siginfo_t info = look_at(pid_, WEXITED | WNOWAIT);
    if (info.si_pid == pid_) {
      status_ = status_of(info);
    }
  }
  return status_.has_value();
}

std::optional<int> RankProcess::take_stop() {
  const siginfo_t info = look_at(pid_, WSTOPPED);
  return info.si_pid == pid_ ? std::optional(info.si_status) : std::nullopt;
}

void RankProcess::signal_group(int signal) const {
  if (!reaped_) {
    ::kill(-pid_, signal);
  }
}

void RankProcess::signal_program(int signal) const {
  if (!reaped_) {
    ::kill(pid_, signal);
  }
}

bool RankProcess::reap() {
  if (reaped_) {
    return true;
  }
  signal_group(SIGKILL);
  const auto deadline = std::chrono::steady_clock::now() + kLongestDeath;
  while (!has_ended()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  guard_.forget(pid_);
  ::waitpid(pid_, nullptr, 0);
  reaped_ = true;
  return true;
}

} // namespace fsdp::detail
