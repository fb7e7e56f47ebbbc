// A rank that is killed, seen by its peers. The ranks are processes.

#include "start/processes.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace fsdp::detail {
namespace {

using fsdp::testing::Command;

constexpr int kSize = 3;
constexpr int kAtOnceMs = 2000;

void expect_seen(const std::string& mode) {
  const fsdp::testing::TemporaryFolder folder;
  const std::string program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() /
      "c10d_peer";
  std::vector<Command> commands;
  for (int rank = 0; rank < kSize; ++rank) {
    commands.push_back(
        {{program,
          mode,
          folder.path() + "/store",
          std::to_string(rank),
          std::to_string(kSize)},
         {}});
  }
  const auto ended = fsdp::testing::run_all(commands, std::chrono::seconds(25));
  for (const int rank : {0, 2}) {
    const auto& peer = ended[static_cast<size_t>(rank)];
    EXPECT_EQ(peer.status, 0) << peer.err;
    EXPECT_NE(
        peer.out.find("rank 1/3 has died: its connection was closed"),
        std::string::npos)
        << "rank " << rank << ": " << peer.out << peer.err;
    EXPECT_LT(std::atoi(peer.out.c_str()), kAtOnceMs) << peer.out;
  }
}

TEST(GlooDeath, IsSeenInACallOnTheCallersMemory) {
  expect_seen("large_call");
}

TEST(GlooDeath, IsSeenWhileTheGroupOfTheNextStepIsMade) {
  expect_seen("new_group");
}

} // namespace
} // namespace fsdp::detail
