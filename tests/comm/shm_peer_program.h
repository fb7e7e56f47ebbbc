#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace fsdp::detail {

/// A running tests/comm/shm_peer.cpp, or another program in the folder of this
/// one that talks in lines; it is killed at the end.
class ShmPeer {
 public:
  explicit ShmPeer(const std::string& program = "shm_peer") {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      throw std::runtime_error("socketpair failed");
    }
    socket_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    std::string path =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / program;
    char* arguments[] = {path.data(), nullptr};
    const int error = ::posix_spawn(
        &pid_, path.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    if (error != 0) {
      throw std::runtime_error("cannot start " + path);
    }
  }

  ~ShmPeer() {
    kill(SIGKILL);
    wait();
    ::close(socket_);
  }

  ShmPeer(const ShmPeer&) = delete;
  ShmPeer& operator=(const ShmPeer&) = delete;

  pid_t pid() const { return pid_; }

  /// Sends a command, see shm_peer.cpp.
  void tell(const std::string& command) {
    const std::string line = command + "\n";
    if (::send(socket_, line.data(), line.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(line.size())) {
      throw std::runtime_error("cannot tell a peer: " + command);
    }
  }

  /// The next answer; "nothing" when it ends or is silent for `limit`.
  std::string answer(
      std::chrono::milliseconds limit = std::chrono::seconds(30)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    std::string line;
    char c = 0;
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(
          end - std::chrono::steady_clock::now());
      pollfd entry{socket_, POLLIN, 0};
      if (left.count() <= 0 ||
          ::poll(&entry, 1, static_cast<int>(left.count())) <= 0 ||
          ::read(socket_, &c, 1) != 1) {
        return "nothing";
      }
      if (c == '\n') {
        return line;
      }
      line += c;
    }
  }

  std::string ask(const std::string& command) {
    tell(command);
    return answer();
  }

  void kill(int signal) const {
    if (!is_reaped_) {
      ::kill(pid_, signal);
    }
  }

  /// How it ended, as of waitpid(); -1 when it does not within 30 s.
  int wait() {
    for (int i = 0; i < 30'000 && !is_reaped_; ++i) {
      is_reaped_ = ::waitpid(pid_, &status_, WNOHANG) == pid_;
      if (!is_reaped_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return is_reaped_ ? status_ : -1;
  }

 private:
  pid_t pid_ = 0;
  int socket_ = -1;
  int status_ = 0;
  bool is_reaped_ = false;
};

/// A job name that no other test has, nor another run of this one.
inline std::string shm_test_job() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->name()) + "-" + std::to_string(::getpid());
}

/// The command that lets a peer join.
inline std::string join_command(
    int rank,
    int size,
    int milliseconds = 20'000,
    size_t bytes = size_t{64} << 20) {
  return "join " + shm_test_job() + " " + std::to_string(rank) + " " +
      std::to_string(size) + " " + std::to_string(milliseconds) + " " +
      std::to_string(bytes);
}

} // namespace fsdp::detail
