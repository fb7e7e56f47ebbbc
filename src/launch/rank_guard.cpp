#include "launch/rank_guard.h"

#include "launch/launch_error.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

namespace fsdp::detail {
namespace {

// Nothing of the launcher may stay open here, or who reads its output would
// wait for the guard too.
void keep_only(int fd) {
  const int null = ::open("/dev/null", O_RDWR);
  for (int standard = 0; standard < 3; ++standard) {
    ::dup2(null, standard);
  }
  ::dup2(fd, 3);
  ::close_range(4, ~0U, 0);
}

void ignore_signals() {
  for (const int signal :
       {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    ::signal(signal, SIG_IGN);
  }
}

// Orders are numbers of groups: to be watched, or negative to be forgotten.
[[noreturn]] void guard(int orders) {
  ::setsid(); // out of reach of the terminal
  ::prctl(PR_SET_NAME, "fsdp-guard");
  ignore_signals();
  keep_only(orders);
  std::set<pid_t> groups;
  pid_t order = 0;
  ssize_t bytes = 0;
  do {
    bytes = ::read(3, &order, sizeof(order));
    if (bytes == sizeof(order)) {
      if (order > 0) {
        groups.insert(order);
      } else {
        groups.erase(-order);
      }
    }
  } while (bytes > 0 || (bytes < 0 && errno == EINTR));
  for (const pid_t group : groups) {
    ::kill(-group, SIGKILL);
  }
  ::_exit(0);
}

void send_order(int fd, pid_t order) {
  // A few bytes always fit; without a guard (it was killed) there is still
  // what the system does for the ranks.
  [[maybe_unused]] const ssize_t sent = ::write(fd, &order, sizeof(order));
}

} // namespace

RankGuard::RankGuard() {
  int ends[2] = {};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw system_error("cannot make a pipe", errno);
  }
  UniqueFd reader(ends[0]);
  orders_ = UniqueFd(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) {
    throw system_error("cannot start a process", errno);
  }
  if (pid_ == 0) {
    guard(reader.get());
  }
}

RankGuard::~RankGuard() {
  orders_.reset();
  ::waitpid(pid_, nullptr, 0);
}

void RankGuard::watch(pid_t group) {
  send_order(orders_.get(), group);
}

void RankGuard::forget(pid_t group) {
  send_order(orders_.get(), -group);
}

} // namespace fsdp::detail
