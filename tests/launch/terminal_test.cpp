// The launcher on a terminal: keys, and a rank that reads.

#include "tool_process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace fsdp::detail {
namespace {

// The tool as the leader of a session with a terminal of its own.
class TerminalTool {
 public:
  explicit TerminalTool(const std::vector<std::string>& arguments) {
    const std::string path = tool_path();
    std::vector<char*> argv = {const_cast<char*>(path.c_str())};
    for (const std::string& argument : arguments) {
      argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    pid_ = ::forkpty(&terminal_, nullptr, nullptr, nullptr);
    if (pid_ == 0) {
      for (const int signal : {SIGINT, SIGQUIT, SIGTSTP, SIGHUP}) {
        ::signal(signal, SIG_DFL);
      }
      ::execv(path.c_str(), argv.data());
      ::_exit(127);
    }
  }

  ~TerminalTool() {
    ::close(terminal_);
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  pid_t pid() const { return pid_; }

  void type(const std::string& keys) {
    EXPECT_EQ(
        ::write(terminal_, keys.data(), keys.size()),
        static_cast<ssize_t>(keys.size()));
  }

  const std::string& screen() {
    pollfd poller{terminal_, POLLIN, 0};
    while (::poll(&poller, 1, 0) == 1) {
      char buffer[1024];
      const ssize_t bytes = ::read(terminal_, buffer, sizeof(buffer));
      if (bytes <= 0) {
        break;
      }
      screen_.append(buffer, static_cast<size_t>(bytes));
    }
    return screen_;
  }

  bool shows(const std::string& text, int times = 1) {
    return becomes_true([&] { return count_of(text, screen()) >= times; });
  }

  int wait() {
    int status = 0;
    ended_ = becomes_true([&] {
      screen();
      return ::waitpid(pid_, &status, WNOHANG) == pid_;
    });
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  int terminal_ = -1;
  pid_t pid_ = -1;
  bool ended_ = false;
  std::string screen_;
};

TEST(Terminal, CtrlCReachesEveryRankOnce) {
  TerminalTool tool(run_script(
      3,
      "n=0; trap 'echo got INT; n=1' INT; echo ready;"
      "while [ $n = 0 ]; do sleep 0.05; done; sleep 0.2"));
  ASSERT_TRUE(tool.shows("ready", 3)) << tool.screen();
  tool.type("\x03");
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(count_of("got INT", tool.screen()), 3) << tool.screen();
}

TEST(Terminal, RankZeroCanReadFromIt) {
  for (const int ranks : {1, 2}) {
    TerminalTool tool(run_script(
        ranks,
        "[ $RANK = 0 ] || exit 0;"
        "echo ready; read line; echo got $line; read line; echo got $line"));
    ASSERT_TRUE(tool.shows("ready")) << tool.screen();
    tool.type("hello\n");
    EXPECT_TRUE(tool.shows("got hello")) << tool.screen();
    tool.type("again\n");
    EXPECT_TRUE(tool.shows("got again")) << tool.screen();
    EXPECT_EQ(tool.wait(), 0) << tool.screen();
  }
}

TEST(Terminal, CtrlCEndsAJobWhoseRankZeroReads) {
  TerminalTool tool(run_script(
      2,
      "echo ready; [ $RANK = 0 ] || exec sleep 1000; read line; echo $line"));
  ASSERT_TRUE(tool.shows("ready", 2)) << tool.screen();
  tool.type("\x03");
  EXPECT_EQ(tool.wait(), 128 + SIGINT) << tool.screen();
}

TEST(Terminal, CtrlZStopsAJobWhoseRankZeroReads) {
  TerminalTool tool(run_script(
      2,
      "echo pid $$; [ $RANK = 0 ] || exec sleep 1000;"
      "read line; echo got $line; read line; exit 3"));
  ASSERT_TRUE(tool.shows("pid", 2)) << tool.screen();
  tool.type("first\n");
  ASSERT_TRUE(tool.shows("got first")) << tool.screen();
  std::vector<pid_t> pids = pids_after("pid", tool.screen());
  pids.push_back(tool.pid());
  tool.type("\x1a");
  for (const pid_t pid : pids) {
    EXPECT_TRUE(becomes_true([pid] { return state_of(pid) == 'T'; }));
  }
  ::kill(tool.pid(), SIGCONT);
  tool.type("second\n");
  EXPECT_EQ(tool.wait(), 3) << tool.screen();
}

} // namespace
} // namespace fsdp::detail
