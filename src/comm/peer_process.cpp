#include "comm/peer_process.h"

#include <poll.h>

#include <fstream>
#include <iterator>
#include <utility>

namespace fsdp::detail {
namespace {

// As /proc numbers it; not positive when it is not of that pid namespace.
pid_t pid_in_proc(const FileDescriptor& handle) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(handle.get()));
  std::string word;
  while (info >> word) {
    if (word == "Pid:") {
      pid_t pid = 0;
      info >> pid;
      return pid;
    }
  }
  return 0;
}

// The letter that ps shows; a space when it is not known.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = line.rfind(')'); // a name may contain anything
  return name_end != std::string::npos && name_end + 2 < line.size()
      ? line[name_end + 2]
      : ' ';
}

} // namespace

PeerProcess::PeerProcess(pid_t pid, FileDescriptor handle)
    : pid_(pid),
      handle_(std::move(handle)) {
}

bool PeerProcess::ended() const {
  pollfd entry{handle_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

std::string PeerProcess::text() const {
  std::string name = pid_text(pid_);
  if (!handle_) {
    return name;
  }
  if (ended()) {
    return name + ", dead";
  }
  const pid_t pid = pid_in_proc(handle_);
  const char state = pid > 0 ? state_of(pid) : ' ';
  const bool is_stopped = state == 'T' || state == 't';
  return is_stopped ? name + ", stopped" : name;
}

std::string pid_text(pid_t pid) {
  return pid > 0 ? "pid " + std::to_string(pid) : "pid unknown";
}

} // namespace fsdp::detail
