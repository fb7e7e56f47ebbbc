// Memory of jobs over shared memory, as the system counts it.

#include "faults/job.h"

#include "start/jobs.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

namespace fsdp::testing {
namespace {

constexpr std::chrono::seconds kLimit(60);

/// Bytes of a process in memory of libfsdp: what several share counts as that
/// part of it for each.
int64_t share_of_memory(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/smaps");
  int64_t bytes = 0;
  bool is_shared = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string first;
    int64_t kilobytes = 0;
    words >> first >> kilobytes;
    if (!first.ends_with(":")) { // a new mapping
      is_shared = has(line, "/memfd:fsdp");
    } else if (is_shared && first == "Pss:") {
      bytes += kilobytes * 1024;
    }
  }
  return bytes;
}

struct Held {
  int64_t shared_bytes = 0; // of all ranks together
  int64_t model_bytes = 0;  // at rest, unsharded
  int64_t shard_bytes = 0;  // of one rank
};

/// A job that has trained for two steps.
Held hold(int size, const std::string& compute) {
  Job job(
      {.backend = "shm",
       .size = size,
       .arguments = {"hold", "compute=" + compute}});
  Held held;
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_TRUE(job.await_line(rank, "holds "));
    std::istringstream numbers(line_after(job.rank(rank).out(), "holds "));
    numbers >> held.model_bytes >> held.shard_bytes;
  }
  for (int rank = 0; rank < size; ++rank) {
    held.shared_bytes += share_of_memory(job.rank(rank).pid());
  }
  job.make_file("end");
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_TRUE(job.await_end(rank, kLimit));
    EXPECT_EQ(job.rank(rank).result().status, 0);
  }
  return held;
}

/// What the ranks need beside the weights: room for two contributions to
/// reductions of one unit, of eight, each, and some pages for control.
int64_t room_for_calls(int size, int64_t weight_bytes) {
  return size * 2 * weight_bytes / 8 + size * (int64_t{512} << 10);
}

void expect_once(const Held& held, int size, int64_t weight_bytes) {
  EXPECT_GE(held.shared_bytes, weight_bytes);
  EXPECT_LE(
      held.shared_bytes, weight_bytes + room_for_calls(size, weight_bytes));
  std::cout << "shared memory of " << size << " ranks: " << held.shared_bytes
            << " bytes, of which weights " << weight_bytes << "\n";
}

TEST(SharedMemory, HoldsWholeWeightsOncePerHost) {
  const int size = 3;
  const auto held = hold(size, "float32");
  ASSERT_GT(held.model_bytes, 8 << 20);
  expect_once(held, size, held.model_bytes);
}

TEST(SharedMemory, HoldsSixteenBitWeightsOnceBesidePrivateShards) {
  const int size = 2;
  const auto held = hold(size, "bfloat16");
  ASSERT_GT(held.model_bytes, 8 << 20);
  EXPECT_GE(held.shard_bytes, held.model_bytes / size);
  EXPECT_LT(held.shard_bytes, held.model_bytes / size + (64 << 10));
  expect_once(held, size, held.model_bytes / 2);
}

TEST(SharedMemory, IsRefusedToAModelThatIsTooLargeForTheLimits) {
  expect_job(
      {.backend = "shm",
       .arguments = {"construct", "megabytes=100", "file_megabytes=64"}},
      kStatusOfFailed,
      "construction: .* bytes of address space are wanted, .*67108864");
}

/// A rank that has forked is killed: the child is no rank, and keeps none
/// alive.
void expect_fork_is_no_rank(const std::string& backend) {
  Job job({.backend = backend, .arguments = {"fork", "victim=1"}});
  auto& victim = job.rank(1);
  EXPECT_TRUE(job.await_line(1, "child can "));
  const auto child = line_after(victim.out(), "child ");
  EXPECT_TRUE(has(child, "has 0 views")) << victim.out();
  EXPECT_TRUE(has(victim.out(), "child can not compute: ")) << victim.out();
  EXPECT_TRUE(has(victim.out(), "fork")) << victim.out();
  EXPECT_TRUE(job.await_line(1, "child has let go")) << victim.out();
  EXPECT_TRUE(job.await_line(1, "goes on")) << victim.out();
  victim.signal(SIGKILL);
  EXPECT_TRUE(job.await_end(0, kLimit));
  const auto ended = job.rank(0).result();
  EXPECT_EQ(ended.status, kStatusOfFailed) << ended.out << ended.err;
  EXPECT_TRUE(has(line_after(ended.out, "failed "), "rank 1/2")) << ended.out;
  job.make_file("end");
  Leavings().expect_none(job);
}

TEST(ForkOfARank, IsNoRankAndKeepsNoneAliveOverSharedMemory) {
  expect_fork_is_no_rank("shm");
}

TEST(ForkOfARank, IsNoRankAndKeepsNoneAliveOverGloo) {
  expect_fork_is_no_rank("gloo");
}

} // namespace
} // namespace fsdp::testing
