#include "launch/descendants.h"

#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <fstream>
#include <thread>
#include <vector>

namespace fsdp::detail {
namespace {

// Empty where the system has no such list: then orphans that have left the
// group of their rank go on.
std::vector<pid_t> children() {
  std::ifstream list("/proc/thread-self/children");
  std::vector<pid_t> result;
  for (pid_t pid = 0; list >> pid;) {
    result.push_back(pid);
  }
  return result;
}

} // namespace

void adopt_orphans() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

void reap_orphans(const std::function<bool(pid_t)>& is_known) {
  for (const pid_t child : children()) {
    if (!is_known(child)) {
      ::waitpid(child, nullptr, WNOHANG);
    }
  }
}

void kill_children(pid_t except, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  bool any = true;
  while (any && std::chrono::steady_clock::now() < deadline) {
    any = false;
    for (const pid_t child : children()) {
      if (child != except) {
        any = true;
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, WNOHANG);
      }
    }
    if (any) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

} // namespace fsdp::detail
