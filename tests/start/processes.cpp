#include "start/processes.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::testing {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_of_a_launcher(const std::string& name) {
  for (const auto* prefix :
       {"RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "LIBFSDP_",
        "TORCHELASTIC_",
        "OMPI_",
        "PMI",
        "MPI_",
        "SLURM_",
        "GLOO_",
        "I_MPI_"}) {
    if (name.starts_with(prefix)) {
      return true;
    }
  }
  return false;
}

/// As NAME=value.
Words environment_with(const Variables& variables) {
  Words entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto name = text.substr(0, text.find('='));
    if (!is_of_a_launcher(name) && !variables.contains(name)) {
      entries.push_back(text);
    }
  }
  for (const auto& [name, value] : variables) {
    entries.push_back(name + "=" + value);
  }
  // Two ranks on few cores.
  entries.push_back("OMP_NUM_THREADS=1");
  return entries;
}

std::vector<char*> pointers(Words& words) {
  std::vector<char*> result;
  for (auto& word : words) {
    result.push_back(word.data());
  }
  result.push_back(nullptr);
  return result;
}

std::string folder_of_this_program() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}

} // namespace

Process::Process(const Command& command, std::string output)
    : output_(std::move(output)) {
  auto words = command.words;
  auto variables = environment_with(command.variables);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const auto& [fd, name] : {std::pair(1, ".out"), std::pair(2, ".err")}) {
    posix_spawn_file_actions_addopen(
        &actions, fd, (output_ + name).c_str(), kFlags, 0600);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  const int error = ::posix_spawnp(
      &pid_,
      words.front().c_str(),
      &actions,
      &attributes,
      pointers(words).data(),
      pointers(variables).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(error, 0) << "can not start " << words.front();
  has_ended_ = error != 0;
}

Process::~Process() {
  kill_and_reap();
}

void Process::signal(int number) {
  if (!has_ended()) {
    ::kill(pid_, number);
  }
}

bool Process::has_ended() {
  int status = 0;
  if (!has_ended_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
    has_ended_ = true;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return has_ended_;
}

std::string Process::out() const {
  return contents(output_ + ".out");
}

Ended Process::result() {
  kill_and_reap();
  return {status_, contents(output_ + ".out"), contents(output_ + ".err")};
}

void Process::kill_and_reap() {
  if (!has_ended_) {
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    has_ended_ = true;
  }
}

std::vector<Ended> run_all(
    const std::vector<Command>& commands,
    std::chrono::milliseconds limit) {
  const TemporaryFolder folder;
  std::vector<std::unique_ptr<Process>> processes;
  for (const auto& command : commands) {
    const auto name = std::to_string(processes.size());
    processes.push_back(
        std::make_unique<Process>(command, folder.path() + "/" + name));
  }
  const auto deadline = Clock::now() + limit;
  const auto all_ended = [&] {
    bool ended = true;
    for (const auto& process : processes) {
      ended = process->has_ended() && ended;
    }
    return ended;
  };
  while (!all_ended() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::vector<Ended> results;
  for (const auto& process : processes) {
    results.push_back(process->result());
  }
  return results;
}

Ended run(const Command& command, std::chrono::milliseconds limit) {
  return run_all({command}, limit).front();
}

std::string rank_program() {
  return folder_of_this_program() + "/start_rank_program";
}

std::string fsdp_tool() {
  return folder_of_this_program() + "/fsdp";
}

std::string path_of(const std::string& program) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto file = folder + "/" + program;
    if (::access(file.c_str(), X_OK) == 0) {
      return file;
    }
  }
  return {};
}

TemporaryFolder::TemporaryFolder() {
  auto path = (fs::temp_directory_path() / "fsdp-start-XXXXXX").string();
  path_ = ::mkdtemp(path.data()) == nullptr ? "" : path;
  EXPECT_NE(path_, "");
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const general = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(socket, general, length), 0);
  EXPECT_EQ(::getsockname(socket, general, &length), 0);
  ::close(socket);
  return ntohs(address.sin_port);
}

} // namespace fsdp::testing
