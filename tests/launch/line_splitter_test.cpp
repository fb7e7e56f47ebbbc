#include "launch/line_splitter.h"
#include "launch/last_lines.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

using Lines = std::vector<std::string>;

Lines split(const Lines& chunks, size_t longest_line = 100) {
  Lines result;
  LineSplitter splitter(longest_line);
  const auto keep = [&](std::string_view line) { result.emplace_back(line); };
  for (const std::string& chunk : chunks) {
    splitter.add(chunk, keep);
  }
  splitter.finish(keep);
  return result;
}

TEST(LineSplitter, GivesLinesWithTheirEnds) {
  EXPECT_EQ(split({"a\nbc\n\nd\n"}), (Lines{"a\n", "bc\n", "\n", "d\n"}));
}

TEST(LineSplitter, JoinsWhatComesInPieces) {
  EXPECT_EQ(split({"a", "b", "c\nd", "", "e\n"}), (Lines{"abc\n", "de\n"}));
}

TEST(LineSplitter, GivesTheLastLineAlsoWithoutAnEnd) {
  EXPECT_EQ(split({"a\nb"}), (Lines{"a\n", "b"}));
  EXPECT_EQ(split({"a\n"}), (Lines{"a\n"}));
}

TEST(LineSplitter, TakesTheUpdatesOfAProgressBarAsLines) {
  EXPECT_EQ(
      split({"10%\r", "20%\r30%", "\r\n"}),
      (Lines{"10%\r", "20%\r", "30%\r\n"}));
}

TEST(LineSplitter, CutsLongLinesIntoPieces) {
  EXPECT_EQ(split({"abcdefg\n"}, 3), (Lines{"abc", "def", "g\n"}));
  EXPECT_EQ(split({"abcdef\nx\r\n"}, 3), (Lines{"abc", "def\n", "x\r\n"}));
}

TEST(LastLines, KeepsTwenty) {
  LastLines last;
  for (int i = 0; i < 50; ++i) {
    last.add("line " + std::to_string(i) + "\n");
  }
  ASSERT_EQ(last.lines().size(), 20u);
  EXPECT_EQ(last.lines().front(), "line 30");
  EXPECT_EQ(last.lines().back(), "line 49");
}

TEST(LastLines, KeepsTheBeginningOfALongLine) {
  LastLines last;
  last.add(std::string(5000, 'x') + "\n");
  EXPECT_EQ(last.lines().front(), std::string(1000, 'x') + " ...");
}

TEST(LastLines, KeepsOneLineOfAProgressBar) {
  LastLines last;
  for (const char* line : {"start\n", "10%\r", "20%\r", "30%\r\n", "end"}) {
    last.add(line);
  }
  EXPECT_EQ(
      (Lines{last.lines().begin(), last.lines().end()}),
      (Lines{"start", "30%", "end"}));
}

TEST(LastLines, AreReadFromTheEndOfAFile) {
  const std::string path = std::filesystem::temp_directory_path() /
      ("last-lines-" + std::to_string(::getpid()));
  std::ofstream file(path);
  for (int i = 0; i < 100'000; ++i) {
    file << "line " << i << "\n";
  }
  file << "no end";
  file.close();
  const LastLines last = last_lines_of_file(path);
  std::remove(path.c_str());
  ASSERT_EQ(last.lines().size(), 20u);
  EXPECT_EQ(last.lines().front(), "line 99981");
  EXPECT_EQ(last.lines().back(), "no end");
  EXPECT_TRUE(last_lines_of_file(path).lines().empty());
}

} // namespace
} // namespace fsdp::detail
