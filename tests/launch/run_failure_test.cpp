// A job ends with its first failure, and leaves nothing behind.

#include "tool_process.h"

#include <gtest/gtest.h>

#include <csignal>
#include <iostream>

namespace fsdp::detail {
namespace {

// The launcher promises one second; a busy machine may take longer.
constexpr double kSoonSeconds = 5;

void expect_soon(const ToolProcess& tool) {
  std::cout << "the job took " << tool.seconds() << " s\n";
  EXPECT_LT(tool.seconds(), kSoonSeconds);
}

TEST(RunFailure, TheStatusIsThatOfTheRankThatFailedFirst) {
  ToolProcess tool(run_script(
      3,
      "[ $RANK = 1 ] && exit 7;"
      "trap 'exit 1' TERM; while :; do sleep 0.05; done"));
  EXPECT_EQ(tool.wait(), 7);
  EXPECT_EQ(count_of("rank 1 (pid ", tool.err()), 1) << tool.err();
  EXPECT_EQ(count_of("failed first: exit status 7 after 0.", tool.err()), 1);
  EXPECT_EQ(count_of(": exit status 1 after ", tool.err()), 2) << tool.err();
}

TEST(RunFailure, ARankThatEndsWellIsNoFailure) {
  ToolProcess tool(
      run_script(2, "[ $RANK = 0 ] && exit 0; sleep 1; echo done"));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(tool.out(), "[1] done\n");
  EXPECT_EQ(tool.err(), "");
}

TEST(RunFailure, ASignalCountsAs128More) {
  ToolProcess tool(
      run_script(2, "[ $RANK = 1 ] && kill -SEGV $$; exec sleep 1000"));
  EXPECT_EQ(tool.wait(), 128 + SIGSEGV);
  EXPECT_EQ(count_of("killed by SIGSEGV (Segmentation fault)", tool.err()), 1)
      << tool.err();
  EXPECT_EQ(count_of("killed by SIGTERM", tool.err()), 1) << tool.err();
  expect_soon(tool);
}

TEST(RunFailure, TheLastTwentyLinesAreRepeated) {
  ToolProcess tool(run_script(
      2,
      "[ $RANK = 0 ] && exec sleep 1000;"
      "i=0; while [ $i -lt 50 ]; do echo line $i; i=$((i+1)); done;"
      "echo 'why it failed' >&2; exit 3"));
  EXPECT_EQ(tool.wait(), 3);
  EXPECT_EQ(count_of("  line 31\n", tool.err()), 1) << tool.err();
  EXPECT_EQ(count_of("  line 49\n", tool.err()), 1) << tool.err();
  EXPECT_EQ(count_of("  why it failed\n", tool.err()), 1) << tool.err();
  EXPECT_EQ(count_of("  line 30\n", tool.err()), 0) << tool.err();
}

TEST(RunFailure, RanksThatDoNotListenAreKilled) {
  ToolProcess tool(run_script(
      8,
      "trap '' TERM INT; [ $RANK = 5 ] && exit 9; while :; do sleep 1; done"));
  EXPECT_EQ(tool.wait(), 9);
  EXPECT_EQ(count_of("killed by SIGKILL", tool.err()), 7) << tool.err();
  expect_soon(tool);
}

TEST(RunFailure, TheOthersMayEndWithTheirOwnMessage) {
  ToolProcess tool(run_script(
      2,
      "file=${TMPDIR:-/tmp}/$LIBFSDP_JOB;"
      "[ $RANK = 1 ] && { : >$file; exit 3; };"
      "trap 'echo too late' TERM;"
      "while [ ! -e $file ]; do sleep 0.01; done; rm $file; sleep 0.05;"
      "echo my peer is gone; exit 4"));
  EXPECT_EQ(tool.wait(), 3);
  EXPECT_EQ(tool.out(), "[0] my peer is gone\n");
  EXPECT_EQ(count_of("exit status 4", tool.err()), 1) << tool.err();
}

// Each rank starts three: one in its group, one that was orphaned, and one in a
// session of its own.
constexpr const char* kStartChildren =
    "sleep 1000 & echo child $!;"
    "(sleep 1000 & echo child $!);"
    "setsid sh -c 'echo child $$; exec sleep 1000' &"
    "sleep 0.3; ";

void expect_children_end(const std::string& out) {
  const std::vector<pid_t> children = pids_after("child", out);
  EXPECT_EQ(children.size(), 6u) << out;
  for (const pid_t child : children) {
    EXPECT_EQ(state_of(child), '-');
  }
}

TEST(RunFailure, WhatTheRanksHaveStartedEndsToo) {
  ToolProcess tool(run_script(
      2, std::string(kStartChildren) + "[ $RANK = 1 ] && exit 5; wait"));
  EXPECT_EQ(tool.wait(), 5);
  expect_children_end(tool.out());
  expect_soon(tool);
}

TEST(RunFailure, NothingIsLeftAfterAGoodEndEither) {
  ToolProcess tool(run_script(2, kStartChildren));
  EXPECT_EQ(tool.wait(), 0);
  expect_children_end(tool.out());
  expect_soon(tool);
}

TEST(RunFailure, NothingIsLeftWhenTheLauncherIsKilled) {
  ToolProcess tool(run_script(
      2,
      "echo pid $$; sh -c 'trap \"\" TERM HUP; echo pid $$; sleep 1000; :'; "
      ":"));
  ASSERT_TRUE(tool.prints("pid", 4));
  ::kill(tool.pid(), SIGKILL);
  EXPECT_EQ(tool.wait(), 128 + SIGKILL);
  for (const pid_t pid : pids_after("pid", tool.out())) {
    EXPECT_TRUE(ends(pid)) << pid;
  }
}

TEST(RunFailure, NothingIsLeftWhenTheLauncherAndItsGroupAreKilled) {
  ToolProcess tool(run_script(2, "echo pid $$; sleep 1000; :"));
  ASSERT_TRUE(tool.prints("pid", 2));
  tool.signal(SIGKILL);
  EXPECT_EQ(tool.wait(), 128 + SIGKILL);
  for (const pid_t pid : pids_after("pid", tool.out())) {
    EXPECT_TRUE(ends(pid)) << pid;
  }
}

TEST(RunFailure, AProgramThatIsNotThereIsSaidOnce) {
  ToolProcess tool({"run", "-n", "3", "--", "no-such-program"});
  EXPECT_EQ(tool.wait(), 127);
  EXPECT_EQ(
      tool.err(),
      "fsdp run: cannot start 'no-such-program': it is not in PATH.\n");
}

TEST(RunFailure, AProgramThatCannotBeExecutedIsSaidOnce) {
  ToolProcess tool({"run", "-n", "3", "--", "/proc/self/status"});
  EXPECT_EQ(tool.wait(), 126);
  EXPECT_EQ(
      tool.err(),
      "fsdp run: cannot start '/proc/self/status': Permission denied\n");
  ToolProcess missing({"run", "-n", "3", "--", "/no/such"});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_EQ(
      missing.err(),
      "fsdp run: cannot start '/no/such': there is no such file.\n");
}

} // namespace
} // namespace fsdp::detail
