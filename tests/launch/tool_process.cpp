#include "tool_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fsdp::detail {
namespace {

using Clock = std::chrono::steady_clock;

int memory_file(const char* name, const std::string& contents = "") {
  const int fd = ::memfd_create(name, MFD_CLOEXEC);
  const auto bytes = static_cast<ssize_t>(contents.size());
  if (fd < 0 || ::pwrite(fd, contents.data(), contents.size(), 0) != bytes) {
    throw std::runtime_error("cannot make a file in memory");
  }
  return fd;
}

std::string contents_of(int fd) {
  struct stat status = {};
  ::fstat(fd, &status);
  std::string contents(static_cast<size_t>(status.st_size), '\0');
  const ssize_t bytes = ::pread(fd, contents.data(), contents.size(), 0);
  contents.resize(static_cast<size_t>(bytes));
  return contents;
}

// A test that runs in the background may have SIGINT ignored; the tool must
// not inherit that.
void set_signals(posix_spawnattr_t* attributes) {
  sigset_t all;
  sigset_t none;
  sigfillset(&all);
  sigemptyset(&none);
  sigdelset(&all, SIGKILL);
  sigdelset(&all, SIGSTOP);
  ::posix_spawnattr_setsigdefault(attributes, &all);
  ::posix_spawnattr_setsigmask(attributes, &none);
  ::posix_spawnattr_setpgroup(attributes, 0);
  ::posix_spawnattr_setflags(
      attributes,
      POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
}

} // namespace

bool becomes_true(const std::function<bool()>& condition) {
  const auto deadline = Clock::now() + kToolLimit;
  while (!condition()) {
    if (Clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(") ");
  const char state = name_end == std::string::npos ? '-' : stat[name_end + 2];
  return state == 'Z' || state == 'X' ? '-' : state;
}

bool ends(pid_t pid) {
  return becomes_true([pid] { return state_of(pid) == '-'; });
}

std::string tool_path() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "fsdp";
}

int count_of(const std::string& text, const std::string& in) {
  int count = 0;
  for (size_t at = in.find(text); at != std::string::npos;
       at = in.find(text, at + text.size())) {
    ++count;
  }
  return count;
}

std::vector<pid_t> pids_after(
    const std::string& name,
    const std::string& text) {
  std::vector<pid_t> pids;
  const std::string before = name + " ";
  for (size_t at = text.find(before); at != std::string::npos;
       at = text.find(before, at + 1)) {
    pids.push_back(std::stoi(text.substr(at + before.size())));
  }
  return pids;
}

ToolProcess::ToolProcess(
    const std::vector<std::string>& arguments,
    const ToolSetup& setup)
    : out_(memory_file("stdout")),
      err_(memory_file("stderr")),
      start_(Clock::now()) {
  const int input = memory_file("stdin", setup.input);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, input, 0);
  ::posix_spawn_file_actions_adddup2(
      &files, setup.stdout_fd >= 0 ? setup.stdout_fd : out_, 1);
  ::posix_spawn_file_actions_adddup2(&files, err_, 2);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  set_signals(&attributes);

  const std::string path = tool_path();
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  const int error = ::posix_spawn(
      &pid_, path.c_str(), &files, &attributes, argv.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  ::close(input);
  if (error != 0) {
    throw std::runtime_error("cannot start " + path);
  }
}

ToolProcess::~ToolProcess() {
  if (!ended_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(out_);
  ::close(err_);
}

std::string ToolProcess::out() const {
  return contents_of(out_);
}

std::string ToolProcess::err() const {
  return contents_of(err_);
}

bool ToolProcess::prints(const std::string& text, int times) const {
  return becomes_true([&] { return count_of(text, out()) >= times; });
}

void ToolProcess::signal(int signal) const {
  ::kill(-pid_, signal);
}

int ToolProcess::wait() {
  int status = 0;
  ended_ =
      becomes_true([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
  seconds_ = std::chrono::duration<double>(Clock::now() - start_).count();
  if (!ended_) {
    return -1;
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::vector<std::string> run_script(
    int ranks,
    const std::string& script,
    const std::vector<std::string>& options) {
  std::vector<std::string> arguments = {"run", "-n", std::to_string(ranks)};
  arguments.insert(arguments.end(), options.begin(), options.end());
  for (const char* word : {"--", "sh", "-c"}) {
    arguments.emplace_back(word);
  }
  arguments.push_back(script);
  return arguments;
}

} // namespace fsdp::detail
