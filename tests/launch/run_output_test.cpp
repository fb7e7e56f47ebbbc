// What the ranks print, and where it goes.

#include "tool_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace fsdp::detail {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::vector<std::string> sorted_lines_of(const std::string& text) {
  std::vector<std::string> lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

using Lines = std::vector<std::string>;

TEST(RunOutput, EachLineHasItsRankAndStaysOnItsStream) {
  ToolProcess tool(run_script(2, "echo out; echo err >&2"));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(sorted_lines_of(tool.out()), (Lines{"[0] out", "[1] out"}));
  EXPECT_EQ(sorted_lines_of(tool.err()), (Lines{"[0] err", "[1] err"}));
}

TEST(RunOutput, OneRankPrintsAsIfAlone) {
  ToolProcess tool(run_script(1, "printf 'a\\nb'; printf c >&2"));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(tool.out(), "a\nb");
  EXPECT_EQ(tool.err(), "c");
}

TEST(RunOutput, RanksPrintThemselvesWithoutPrefix) {
  ToolProcess tool(run_script(2, "echo same", {"--no-prefix"}));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(tool.out(), "same\nsame\n");
}

TEST(RunOutput, LinesOfManyRanksAreNeverMixed) {
  constexpr int kRanks = 8;
  constexpr int kLines = 500;
  ToolProcess tool(run_script(
      kRanks,
      "line=$(printf \"%0300d\" 0 | tr 0 $RANK); i=0;"
      "while [ $i -lt 500 ]; do echo $line; i=$((i+1)); done"));
  EXPECT_EQ(tool.wait(), 0);
  std::vector<int> counts(kRanks);
  for (const std::string& line : lines_of(tool.out())) {
    const char rank = line.at(1);
    ASSERT_EQ(line, std::string("[") + rank + "] " + std::string(300, rank));
    ++counts.at(static_cast<size_t>(rank - '0'));
  }
  EXPECT_EQ(counts, std::vector<int>(kRanks, kLines));
}

TEST(RunOutput, AMegabyteWithoutALineEndComesThroughInPieces) {
  ToolProcess tool(
      run_script(2, "[ $RANK = 1 ] || head -c 1000000 /dev/zero | tr '\\0' x"));
  EXPECT_EQ(tool.wait(), 0);
  size_t total = 0;
  for (const std::string& line : lines_of(tool.out())) {
    ASSERT_EQ(line.substr(0, 5), "[0] x");
    EXPECT_LE(line.size(), 4u + (64u << 10));
    total += static_cast<size_t>(std::count(line.begin(), line.end(), 'x'));
  }
  EXPECT_EQ(total, 1'000'000u);
}

TEST(RunOutput, TheLastLineNeedsNoEnd) {
  ToolProcess tool(run_script(2, "printf \"end of $RANK\""));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(
      sorted_lines_of(tool.out()), (Lines{"[0] end of 0", "[1] end of 1"}));
}

TEST(RunOutput, LinesAppearBeforeTheRankEnds) {
  ToolProcess tool(run_script(2, "echo ready; sleep 1000"));
  EXPECT_TRUE(tool.prints("ready", 2));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait(), 143);
}

TEST(RunOutput, ARankMayCloseItsStreams) {
  ToolProcess tool(run_script(
      2, "echo first; exec >&-; sleep 0.2; echo second >&2; exec 2>&-"));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(sorted_lines_of(tool.out()), (Lines{"[0] first", "[1] first"}));
  EXPECT_EQ(sorted_lines_of(tool.err()), (Lines{"[0] second", "[1] second"}));
}

TEST(RunOutput, ALogHasBothStreamsOfItsRank) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() /
      ("logs-" + std::to_string(::getpid())) / "deeper";
  ToolProcess tool(run_script(
      2, "echo out $RANK; echo err >&2", {"--log-dir", folder.string()}));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(tool.out() + tool.err(), "");
  for (const char* rank : {"0", "1"}) {
    std::ifstream log(folder / (std::string("rank-") + rank + ".log"));
    std::stringstream contents;
    contents << log.rdbuf();
    EXPECT_EQ(contents.str(), std::string("out ") + rank + "\nerr\n");
  }
  std::filesystem::remove_all(folder.parent_path());
}

TEST(RunOutput, AFailureQuotesTheLog) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() /
      ("failing-logs-" + std::to_string(::getpid()));
  ToolProcess tool(run_script(
      2,
      "echo some text; [ $RANK = 0 ] || exit 4",
      {"--log-dir", folder.string()}));
  EXPECT_EQ(tool.wait(), 4);
  std::filesystem::remove_all(folder);
  EXPECT_EQ(tool.out(), "");
  EXPECT_EQ(
      count_of("rank-1.log. Its last lines:\n  some text\n", tool.err()), 1)
      << tool.err();
}

TEST(RunOutput, ALogFolderThatCannotBeIsAnError) {
  ToolProcess tool(run_script(2, "true", {"--log-dir", "/dev/null/logs"}));
  EXPECT_EQ(tool.wait(), 1);
  EXPECT_EQ(
      tool.err(),
      "fsdp run: cannot make the folder '/dev/null/logs': Not a directory\n");
}

// Nobody reads stdout: the launcher still sees the failure and ends the ranks.
TEST(RunOutput, AReaderThatDoesNotReadDelaysNoFailure) {
  int ends_of_pipe[2] = {};
  ASSERT_EQ(::pipe2(ends_of_pipe, O_CLOEXEC), 0);
  ToolProcess tool(
      run_script(
          2, "echo pid $$ >&2; [ $RANK = 0 ] && exec yes; sleep 0.5; exit 3"),
      {.stdout_fd = ends_of_pipe[1]});
  ::close(ends_of_pipe[1]);
  ASSERT_TRUE(
      becomes_true([&] { return pids_after("pid", tool.err()).size() == 2; }));
  for (const pid_t pid : pids_after("pid", tool.err())) {
    EXPECT_TRUE(ends(pid));
  }
  ::close(ends_of_pipe[0]);
  EXPECT_EQ(tool.wait(), 3);
}

TEST(RunOutput, ARankGetsSigpipeWhenTheReaderHasGone) {
  int ends_of_pipe[2] = {};
  ASSERT_EQ(::pipe2(ends_of_pipe, O_CLOEXEC), 0);
  ToolProcess tool(run_script(2, "exec yes"), {.stdout_fd = ends_of_pipe[1]});
  ::close(ends_of_pipe[1]);
  char byte = 0;
  EXPECT_EQ(::read(ends_of_pipe[0], &byte, 1), 1);
  ::close(ends_of_pipe[0]);
  EXPECT_EQ(tool.wait(), 128 + SIGPIPE);
}

} // namespace
} // namespace fsdp::detail
