#include "launch/cpu_binding.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <thread>

namespace fsdp::detail {
namespace {

using Shares = std::vector<std::vector<int>>;

// Two sockets of two cores with two hardware threads each, numbered as usual:
// first a thread of every core, then the other ones.
std::vector<Cpu> two_sockets() {
  std::vector<Cpu> cpus;
  for (int id = 0; id < 8; ++id) {
    cpus.push_back({id, id % 4 / 2, id % 2});
  }
  return cpus;
}

TEST(CpuBinding, CoreGivesEachRankItsOwnCores) {
  EXPECT_EQ(
      bind_ranks(Binding::kCore, two_sockets(), 4),
      (Shares{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(
      bind_ranks(Binding::kCore, two_sockets(), 2),
      (Shares{{0, 4, 1, 5}, {2, 6, 3, 7}}));
}

TEST(CpuBinding, CoreUsesAllProcessorsAlsoWhereTheyDoNotDivideEvenly) {
  EXPECT_EQ(
      bind_ranks(Binding::kCore, two_sockets(), 3),
      (Shares{{0, 4}, {1, 5, 2}, {6, 3, 7}}));
}

TEST(CpuBinding, RanksMayOutnumberTheProcessors) {
  const std::vector<Cpu> two = {{3, 0, 0}, {7, 0, 1}};
  EXPECT_EQ(bind_ranks(Binding::kCore, two, 4), (Shares{{3}, {3}, {7}, {7}}));
}

TEST(CpuBinding, SocketGivesConsecutiveRanksOneSocket) {
  EXPECT_EQ(
      bind_ranks(Binding::kSocket, two_sockets(), 4),
      (Shares{{0, 1, 4, 5}, {0, 1, 4, 5}, {2, 3, 6, 7}, {2, 3, 6, 7}}));
}

TEST(CpuBinding, AutoBindsWhereRanksDivideEvenlyOverSeveralSockets) {
  EXPECT_EQ(
      bind_ranks(Binding::kAuto, two_sockets(), 2),
      bind_ranks(Binding::kSocket, two_sockets(), 2));
  EXPECT_EQ(bind_ranks(Binding::kAuto, two_sockets(), 3), Shares(3));
  EXPECT_EQ(bind_ranks(Binding::kAuto, {{0, 0, 0}, {1, 0, 1}}, 2), Shares(2));
}

TEST(CpuBinding, NoneBindsNobody) {
  EXPECT_EQ(bind_ranks(Binding::kNone, two_sockets(), 2), Shares(2));
}

TEST(CpuBinding, ReadsTheTopology) {
  const std::filesystem::path sysfs = std::filesystem::temp_directory_path() /
      ("topology-" + std::to_string(::getpid()));
  const std::vector<Cpu> here = allowed_cpus();
  ASSERT_FALSE(here.empty());
  const auto folder =
      sysfs / ("cpu" + std::to_string(here.front().id)) / "topology";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "physical_package_id") << "5\n";
  std::ofstream(folder / "core_id") << "7\n";

  const std::vector<Cpu> read = allowed_cpus(sysfs);
  std::filesystem::remove_all(sysfs);
  ASSERT_EQ(read.size(), here.size());
  EXPECT_EQ(read.front().id, here.front().id);
  EXPECT_EQ(read.front().socket, 5);
  EXPECT_EQ(read.front().core, 7);
}

// Affinity belongs to a thread, so another one can try it.
TEST(CpuBinding, SetAffinityBindsAndTellsWhatCannotBe) {
  std::thread([] {
    const int last = allowed_cpus().back().id;
    EXPECT_EQ(set_affinity({last}), 0);
    const std::vector<Cpu> bound = allowed_cpus();
    ASSERT_EQ(bound.size(), 1u);
    EXPECT_EQ(bound.front().id, last);
    EXPECT_EQ(set_affinity({16000}), EINVAL);
  }).join();
}

} // namespace
} // namespace fsdp::detail
