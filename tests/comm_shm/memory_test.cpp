// Address space and memory of a segment: who has it, and who gets it back.

#include "comm/one_thread.h"
#include "comm/shm_host.h"
#include "shm_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace fsdp::detail {
namespace {

using std::chrono::seconds;

constexpr size_t kMegabyte = size_t{1} << 20;

std::vector<std::shared_ptr<ShmHost>> make_hosts(int ranks) {
  std::vector<std::shared_ptr<ShmHost>> hosts;
  for (auto& segment : ShmSegment::for_threads(ranks, 64 * kMegabyte)) {
    hosts.push_back(
        std::make_shared<ShmHost>(std::move(segment), seconds(1), 0));
  }
  return hosts;
}

bool is_zero(const std::byte* data, size_t bytes) {
  return std::all_of(
      data, data + bytes, [](std::byte each) { return each == std::byte{0}; });
}

TEST(SharedAddresses, AreUsedAgainAsZeros) {
  const auto host = make_hosts(1)[0];
  const size_t first = host->allocate(3 * kMegabyte);
  const size_t second = host->allocate(10'000);
  std::fill_n(host->at(first), 3 * kMegabyte, std::byte{7});
  host->free(first, 3 * kMegabyte);
  EXPECT_EQ(host->allocate(kMegabyte), first);
  EXPECT_EQ(host->allocate(2 * kMegabyte), first + kMegabyte);
  EXPECT_TRUE(is_zero(host->at(first), 3 * kMegabyte));
  EXPECT_TRUE(second >= first + 3 * kMegabyte || second < first);
}

TEST(SharedAddresses, OfNeighboursBecomeOneRange) {
  const auto host = make_hosts(1)[0];
  std::vector<size_t> ranges;
  for (int i = 0; i < 4; ++i) {
    ranges.push_back(host->allocate(4096));
  }
  for (const size_t i : {2u, 0u, 3u, 1u}) {
    host->free(ranges[i], 4096);
  }
  EXPECT_EQ(host->allocate(4 * 4096), ranges[0]);
}

TEST(SharedAddresses, GoBackToTheRankThatTookThem) {
  const auto hosts = make_hosts(2);
  const size_t first = hosts[0]->allocate(kMegabyte);
  const size_t second = hosts[0]->allocate(kMegabyte);
  for (const size_t offset : {first, second}) {
    std::fill_n(hosts[0]->at(offset), kMegabyte, std::byte{7});
    hosts[1]->free(offset, kMegabyte, 0);
  }
  const size_t other = hosts[1]->allocate(kMegabyte);
  EXPECT_TRUE(other != first && other != second);
  EXPECT_EQ(hosts[0]->allocate(2 * kMegabyte), std::min(first, second));
  EXPECT_TRUE(is_zero(hosts[0]->at(first), kMegabyte));
  EXPECT_TRUE(is_zero(hosts[0]->at(second), kMegabyte));
}

TEST(SharedAddresses, AreLeftWhenTooManyWereWanted) {
  const auto host = make_hosts(1)[0];
  for (int i = 0; i < 3; ++i) {
    const std::string text = error_of([&] { host->allocate(100 * kMegabyte); });
    EXPECT_TRUE(contains(
        text,
        "104857600 bytes of address space are wanted, but not so many of all "
        "67108864 are left. Is the address space limited (ulimit -v)?"))
        << text;
  }
  host->allocate(40 * kMegabyte);
}

TEST(SharedAddresses, MustHoldWhatAllRanksBeginWith) {
  auto segment = ShmSegment::for_threads(1, 2 * kMegabyte)[0];
  const std::string text = error_of(
      [&] { ShmHost(std::move(segment), seconds(1), 100 * kMegabyte); });
  EXPECT_TRUE(contains(text, "of address space are wanted")) << text;
}

// Nets come and go. Which rank is the last to destroy one is up to chance.
TEST(SharedAddresses, OfNetsThatAreGoneServeNewNets) {
  const JoinWorld join = make_world_of_shm(3, seconds(20), 64 * kMegabyte);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto world = join(rank);
      const std::string text = error_of([&] {
        for (int i = 0; i < 600; ++i) {
          const std::vector<int64_t> slices = {400'000, 100};
          const auto child = world->split(0, -rank);
          const auto shared = child->share_slices(slices);
          EXPECT_EQ(shared->own(1)[0], std::byte{0});
          shared->own(1)[0] = std::byte{1};
          if (i % 3 == rank) {
            std::this_thread::sleep_for(std::chrono::microseconds(200));
          }
        }
      });
      EXPECT_EQ(text, "no error") << "rank " << rank;
    });
  }
  for (std::thread& each : ranks) {
    each.join();
  }
}

// Errors of one rank that all must have.

std::vector<std::string> errors_of_all(
    int size,
    const std::function<void(Communicator&)>& call) {
  const JoinWorld join = make_world_of_shm(size, seconds(20), 64 * kMegabyte);
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto comm = join(rank);
      errors[static_cast<size_t>(rank)] = error_of([&] { call(*comm); });
      EXPECT_EQ(error_of([&] { comm->barrier("after"); }), "no error");
    });
  }
  for (std::thread& each : ranks) {
    each.join();
  }
  return errors;
}

TEST(SharedMemory, ThatOneRankCanNotReserveIsAnErrorOfAll) {
  const auto errors = errors_of_all(3, [](Communicator& comm) {
    comm.reserve(comm.rank() == 1 ? int64_t{1} << 40 : 100);
  });
  EXPECT_TRUE(contains(errors[0], "rank 1/3: shared memory: ")) << errors[0];
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(SharedMemory, ThatSlicesDoNotFitIntoIsAnErrorOfAll) {
  const auto errors = errors_of_all(3, [](Communicator& comm) {
    const std::vector<int64_t> too_much = {int64_t{1} << 32};
    comm.share_slices(too_much);
  });
  EXPECT_TRUE(contains(errors[0], "rank 0/3: shared memory: ")) << errors[0];
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(SharedMemory, ThatACallDoesNotFitIntoEndsTheStepOfAll) {
  const auto errors = errors_of_all(2, [](Communicator& comm) {
    Bytes buffer(static_cast<size_t>(comm.size()) * 40 * kMegabyte);
    comm.all_gather(buffer, "all_gather of unit 'a'")->wait();
  });
  for (const std::string& text : errors) {
    EXPECT_TRUE(
        contains(text, "failed: all_gather of unit 'a': shared memory: "))
        << text;
  }
}

TEST(SharedMemory, ThatIsReservedHoldsACallOfThatSize) {
  const JoinWorld join = make_world_of_shm(1, seconds(20), 64 * kMegabyte);
  const auto comm = join(0);
  const size_t bytes = 4 * kMegabyte;
  comm->reserve(static_cast<int64_t>(bytes));
  // What is left is too small for a second arena.
  const std::vector<int64_t> rest = {45 << 20};
  const auto shared = comm->share_slices(rest);
  Bytes buffer(bytes);
  comm->all_reduce(buffer, DType::kInt32, ReduceOp::kSum, "sum")->wait();
}

// Whoever asks must get the whole text from the first moment on.
TEST(Abort, IsNeverSeenWithoutItsReason) {
  for (int round = 0; round < 300; ++round) {
    const auto hosts = make_hosts(3);
    const auto reason_of = [](int rank) {
      return std::string(1500, 'x') + " by rank " + std::to_string(rank);
    };
    std::vector<std::thread> ranks;
    for (const int rank : {0, 1}) {
      ranks.emplace_back([&, rank] {
        hosts[static_cast<size_t>(rank)]->abort(reason_of(rank));
      });
    }
    std::string text;
    while ((text = hosts[2]->aborted()).empty()) {}
    for (std::thread& each : ranks) {
      each.join();
    }
    const std::string start = "the ranks were aborted: ";
    ASSERT_TRUE(text == start + reason_of(0) || text == start + reason_of(1))
        << text;
    ASSERT_EQ(hosts[0]->aborted(), text);
  }
}

} // namespace
} // namespace fsdp::detail
