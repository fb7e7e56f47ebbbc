#include "launch/failure_report.h"

#include <gtest/gtest.h>

#include <csignal>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;

TEST(ExitStatus, IsWhatAShellShows) {
  EXPECT_TRUE(ExitStatus{}.ok());
  EXPECT_EQ((ExitStatus{3, 0, false}).shell_code(), 3);
  EXPECT_EQ((ExitStatus{0, SIGKILL, false}).shell_code(), 137);
  EXPECT_FALSE((ExitStatus{0, SIGKILL, false}).ok());
}

TEST(ExitStatus, IsDescribedInWords) {
  EXPECT_EQ((ExitStatus{3, 0, false}).describe(), "exit status 3");
  EXPECT_EQ(
      (ExitStatus{0, SIGSEGV, true}).describe(),
      "killed by SIGSEGV (Segmentation fault), core dumped");
}

TEST(FailureReport, TellsWhoFailedFirstAndWithWhichLines) {
  LastLines lines;
  lines.add("loss 3\n");
  lines.add("error: no data\n");
  const std::vector<FailedRank> failed = {
      {2, 4711, {3, 0, false}, milliseconds(12345)},
      {0, 4709, {0, SIGTERM, false}, milliseconds(12650)}};
  EXPECT_EQ(
      failure_report(failed, lines, "", ""),
      "fsdp run: rank 2 (pid 4711) failed first: exit status 3 after 12.3 s. "
      "Its last lines:\n"
      "  loss 3\n"
      "  error: no data\n"
      "fsdp run: rank 0 (pid 4709): killed by SIGTERM (Terminated) after "
      "12.7 s\n");
}

TEST(FailureReport, NamesTheLog) {
  EXPECT_EQ(
      failure_report(
          {{0, 7, {1, 0, false}, milliseconds(0)}}, {}, "", "d/r.log"),
      "fsdp run: rank 0 (pid 7) failed first: exit status 1 after 0.0 s. "
      "Its log is d/r.log.\n");
}

TEST(FailureReport, BlamesNobodyWhenTheUserEndsTheJob) {
  LastLines lines;
  lines.add("loss 3\n");
  EXPECT_EQ(
      failure_report(
          {{0, 7, {0, SIGINT, false}, milliseconds(1000)}},
          lines,
          "SIGINT",
          ""),
      "fsdp run: ended by SIGINT.\n"
      "fsdp run: rank 0 (pid 7): killed by SIGINT (Interrupt) after 1.0 s\n");
}

} // namespace
} // namespace fsdp::detail
