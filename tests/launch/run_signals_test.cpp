// Signals to the launcher reach the ranks.

#include "tool_process.h"

#include <gtest/gtest.h>

#include <csignal>
#include <thread>

namespace fsdp::detail {
namespace {

// Tells about each signal that comes, and ends well soon after the first.
std::string tell_signal(const std::string& name) {
  return "n=0; trap 'echo got " + name + "; n=1' " + name +
      "; echo ready; while [ $n = 0 ]; do sleep 0.05; done; sleep 0.2; exit 0";
}

TEST(RunSignals, CtrlCReachesEveryRankOnce) {
  ToolProcess tool(run_script(3, tell_signal("INT")));
  ASSERT_TRUE(tool.prints("ready", 3));
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), 0); // all ranks have ended well
  EXPECT_EQ(count_of("got INT", tool.out()), 3) << tool.out();
}

TEST(RunSignals, RanksThatEndByCtrlCGive130AndNoBlame) {
  ToolProcess tool(run_script(2, "echo ready; exec sleep 1000"));
  ASSERT_TRUE(tool.prints("ready", 2));
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), 128 + SIGINT);
  EXPECT_EQ(count_of("fsdp run: ended by SIGINT.\n", tool.err()), 1)
      << tool.err();
  EXPECT_EQ(count_of("failed first", tool.err()), 0) << tool.err();
}

TEST(RunSignals, TerminateHangUpAndQuitArePassedOn) {
  for (const auto& [name, signal] :
       {std::pair("TERM", SIGTERM), {"HUP", SIGHUP}, {"QUIT", SIGQUIT}}) {
    ToolProcess tool(run_script(2, tell_signal(name)));
    ASSERT_TRUE(tool.prints("ready", 2));
    tool.signal(signal);
    EXPECT_EQ(tool.wait(), 0);
    EXPECT_EQ(count_of("got", tool.out()), 2) << tool.out();
  }
}

TEST(RunSignals, UserSignalsReachTheProgramAlone) {
  for (const auto& [name, signal] :
       {std::pair("USR1", SIGUSR1), {"USR2", SIGUSR2}}) {
    ToolProcess tool(run_script(
        2,
        "sleep 1000 & trap 'echo got; exit 0' " + std::string(name) +
            "; echo child $!; while :; do wait; done"));
    ASSERT_TRUE(tool.prints("child", 2));
    ::kill(tool.pid(), signal);
    EXPECT_EQ(tool.wait(), 0);
    EXPECT_EQ(count_of("got", tool.out()), 2) << tool.out();
  }
}

TEST(RunSignals, AUserSignalDoesNotEndTheJob) {
  ToolProcess tool(run_script(2, tell_signal("USR1"), {"--grace", "0"}));
  ASSERT_TRUE(tool.prints("ready", 2));
  ::kill(tool.pid(), SIGUSR1);
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(count_of("got USR1", tool.out()), 2) << tool.out();
}

constexpr const char* kStayOn =
    "trap 'echo got INT' INT; echo ready; while :; do sleep 0.05; done";

TEST(RunSignals, RanksThatGoOnAreKilledAfterTheGrace) {
  ToolProcess tool(run_script(2, kStayOn, {"--grace", "0.5"}));
  ASSERT_TRUE(tool.prints("ready", 2));
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), 128 + SIGKILL);
  EXPECT_GE(tool.seconds(), 0.5);
}

TEST(RunSignals, ASecondCtrlCKillsAtOnce) {
  ToolProcess tool(run_script(2, kStayOn, {"--grace", "1000"}));
  ASSERT_TRUE(tool.prints("ready", 2));
  tool.signal(SIGINT);
  ASSERT_TRUE(tool.prints("got INT", 2));
  // What follows sooner is taken for the same request.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(count_of("got INT", tool.out()), 2);
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), 128 + SIGKILL);
  EXPECT_EQ(count_of("got INT", tool.out()), 2) << tool.out();
}

TEST(RunSignals, CtrlZStopsAndContinuesTheWholeJob) {
  ToolProcess tool(run_script(2, "echo pid $$; sleep 1; exit 0"));
  ASSERT_TRUE(tool.prints("pid", 2));
  std::vector<pid_t> pids = pids_after("pid", tool.out());
  pids.push_back(tool.pid());
  tool.signal(SIGTSTP);
  for (const pid_t pid : pids) {
    EXPECT_TRUE(becomes_true([pid] { return state_of(pid) == 'T'; }));
  }
  tool.signal(SIGCONT);
  EXPECT_EQ(tool.wait(), 0);
}

TEST(RunSignals, WhatIsIgnoredAtTheStartStaysIgnored) {
  // `nohup` in a shell, so that the test itself ignores nothing.
  ToolProcess tool(run_script(
      1,
      "trap '' HUP; exec " + tool_path() +
          " run -n 2 -- sh -c 'echo ready; sleep 1'"));
  ASSERT_TRUE(tool.prints("ready", 2));
  tool.signal(SIGHUP);
  EXPECT_EQ(tool.wait(), 0);
}

} // namespace
} // namespace fsdp::detail
