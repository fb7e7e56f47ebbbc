// Failures of a step, told through the store.

#include "comm/sample_data.h"
#include "gloo_world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::detail {
namespace {

using Comm = std::shared_ptr<Communicator>;
using Clock = std::chrono::steady_clock;

constexpr auto kSoon = std::chrono::seconds(3);

std::string barrier_error(Communicator& comm) {
  return error_of([&] { comm.barrier("b"); });
}

std::unique_ptr<Work> start_sum(Communicator& comm, Bytes& buffer) {
  return comm.all_reduce(buffer, DType::kInt32, ReduceOp::kSum, "sum");
}

void expect_all_meet(const std::vector<Comm>& comms) {
  const auto sum = static_cast<int32_t>(comms.size());
  std::vector<Bytes> buffers(comms.size(), bytes_of<int32_t>({1}));
  std::vector<std::unique_ptr<Work>> works;
  for (size_t r = 0; r < comms.size(); ++r) {
    works.push_back(start_sum(*comms[r], buffers[r]));
  }
  for (size_t r = 0; r < comms.size(); ++r) {
    works[r]->wait();
    EXPECT_EQ(buffers[r], bytes_of<int32_t>({sum}));
    EXPECT_EQ(comms[r]->epoch(), comms[0]->epoch());
  }
}

class GlooFailure : public testing::Test {
 protected:
  Communicator& rank(size_t r) { return *comms_[r]; }

  /// Large enough to be sent from where they are.
  std::vector<Bytes> large_ = std::vector<Bytes>(3, Bytes(3 << 20));
  Bytes small_ = bytes_of<int32_t>({1});
  std::vector<Comm> comms_ = join_all(make_world_of_gloo(3, kGlooLimit), 3);
};

TEST_F(GlooFailure, ReachesAWaitThatIsPending) {
  const auto begin = Clock::now();
  const auto work = start_sum(rank(0), small_);
  EXPECT_FALSE(work->ready());
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    rank(1).signal_failure("out of memory");
  });
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 1/3 failed: out of memory");
  peer.join();
  EXPECT_EQ(barrier_error(rank(2)), "rank 1/3 failed: out of memory");
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 1/3 failed: out of memory");
  EXPECT_LT(Clock::now() - begin, kSoon);
  expect_all_meet(comms_);
  EXPECT_EQ(rank(0).epoch(), 1u);
}

TEST_F(GlooFailure, OwnWorksThrowTheOwnFailure) {
  const auto work = start_sum(rank(0), small_);
  rank(0).signal_failure("a");
  EXPECT_TRUE(work->ready());
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 0/3 failed: a");
  EXPECT_EQ(rank(0).epoch(), 1u);
}

TEST_F(GlooFailure, LeavesCallsThatTheFailedRankHasMade) {
  std::vector<Bytes> buffers(3, bytes_of<int32_t>({1}));
  start_sum(rank(0), buffers[0])->ready();
  rank(0).signal_failure("a");
  const auto first = start_sum(rank(1), buffers[1]);
  start_sum(rank(2), buffers[2])->wait();
  first->wait();
  EXPECT_EQ(buffers[1], bytes_of<int32_t>({3}));
  EXPECT_EQ(buffers[2], bytes_of<int32_t>({3}));
  EXPECT_EQ(barrier_error(rank(1)), "rank 0/3 failed: a");
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: a");
  expect_all_meet(comms_);
}

TEST_F(GlooFailure, LeavesCallsOfSeveralRoundsToo) {
  const std::string text(5000, 'x'); // two rounds
  std::thread failed([&] {
    EXPECT_EQ(error_of([&] { rank(0).exchange(text, "names"); }), "no error");
    rank(0).signal_failure("a");
  });
  std::thread peer([&] { rank(1).exchange(text, "names"); });
  EXPECT_EQ(rank(2).exchange("y", "names")[0], text);
  peer.join();
  failed.join();
  EXPECT_EQ(barrier_error(rank(1)), "rank 0/3 failed: a");
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: a");
  expect_all_meet(comms_);
}

TEST_F(GlooFailure, TwiceInARowReachesThePeersOneByOne) {
  rank(0).signal_failure("first");
  rank(0).signal_failure("second");
  for (const size_t r : {1u, 2u}) {
    EXPECT_EQ(barrier_error(rank(r)), "rank 0/3 failed: first");
    EXPECT_EQ(barrier_error(rank(r)), "rank 0/3 failed: second");
  }
  expect_all_meet(comms_);
  EXPECT_EQ(rank(1).epoch(), 2u);
}

TEST_F(GlooFailure, FirstOfAnEpochWins) {
  rank(0).signal_failure("first");
  rank(1).signal_failure("second");
  EXPECT_EQ(rank(1).epoch(), 1u);
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: first");
  expect_all_meet(comms_);
}

TEST_F(GlooFailure, OfANewEpochWaitsForThoseInTheOldOne) {
  rank(0).signal_failure("old");
  EXPECT_EQ(barrier_error(rank(1)), "rank 0/3 failed: old");
  rank(1).signal_failure("new");
  EXPECT_EQ(barrier_error(rank(0)), "rank 1/3 failed: new");
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: old");
  EXPECT_EQ(barrier_error(rank(2)), "rank 1/3 failed: new");
  expect_all_meet(comms_);
}

TEST_F(GlooFailure, OfAStepFreesTheMemoryOfItsLargeCalls) {
  auto first = start_sum(rank(0), large_[0]);
  auto second = start_sum(rank(1), large_[1]);
  const auto begin = Clock::now();
  rank(2).signal_failure("a");
  EXPECT_EQ(error_of([&] { first->wait(); }), "rank 2/3 failed: a");
  large_[0] = Bytes(); // nobody writes to it any more
  EXPECT_EQ(error_of([&] { second->wait(); }), "rank 2/3 failed: a");
  large_[1] = Bytes();
  EXPECT_LT(Clock::now() - begin, kSoon);
  expect_all_meet(comms_);
}

// A net drops its works before it tells of a failure. Nobody comes to complete
// them, so that the memory is freed by closing the connections.
TEST_F(GlooFailure, IsToldWhereLargeCallsWereDroppedBefore) {
  start_sum(rank(0), large_[0]).reset();
  large_[0] = Bytes();
  std::vector<std::thread> peers;
  for (const size_t r : {1u, 2u}) {
    peers.emplace_back([&, r] {
      const auto work = start_sum(rank(r), large_[r]);
      EXPECT_EQ(error_of([&] { work->wait(); }), "rank 0/3 failed: a");
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  rank(0).signal_failure("a");
  for (std::thread& peer : peers) {
    peer.join();
  }
  expect_all_meet(comms_);
}

TEST_F(GlooFailure, ReachesChildrenEachAtItsOwnCalls) {
  const auto children = split_all(comms_);
  const auto others = split_all(comms_);
  std::vector<Bytes> buffers(3, bytes_of<int32_t>({1}));
  start_sum(*children[0], buffers[0]);
  rank(0).signal_failure("a");
  const auto work = start_sum(*children[1], buffers[1]);
  start_sum(*children[2], buffers[2])->wait();
  work->wait();
  for (const size_t r : {1u, 2u}) {
    EXPECT_EQ(barrier_error(*children[r]), "rank 0/3 failed: a");
    EXPECT_EQ(barrier_error(*others[r]), "rank 0/3 failed: a");
    EXPECT_EQ(comms_[r]->epoch(), 0u);
    EXPECT_EQ(barrier_error(rank(r)), "rank 0/3 failed: a");
  }
  expect_all_meet(children);
  expect_all_meet(others);
  expect_all_meet(comms_);
}

TEST_F(GlooFailure, IsNotWaitedForInCallsThatAreDropped) {
  auto work = start_sum(rank(0), large_[0]);
  rank(1).signal_failure("a");
  const auto begin = Clock::now();
  work.reset(); // rank 1 will not come to it
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(1000));
  for (const size_t r : {0u, 2u}) {
    EXPECT_EQ(barrier_error(rank(r)), "rank 1/3 failed: a");
  }
  expect_all_meet(comms_);
}

// As when an exception destroys a net before somebody tells of it.
TEST_F(GlooFailure, ReachesChildrenThatTheRankHasLeftBefore) {
  auto children = split_all(comms_);
  std::vector<std::thread> peers;
  for (const size_t r : {0u, 2u}) {
    peers.emplace_back([&, r] {
      EXPECT_EQ(barrier_error(*children[r]), "rank 1/3 failed: out of data");
    });
  }
  children[1].reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  rank(1).signal_failure("out of data");
  for (std::thread& peer : peers) {
    peer.join();
  }
  for (const size_t r : {0u, 2u}) {
    EXPECT_EQ(barrier_error(rank(r)), "rank 1/3 failed: out of data");
  }
  expect_all_meet(comms_);
}

// Were a group made inside of a call, the ranks would wait for each other.
TEST_F(GlooFailure, CommunicatorsMeetAgainInAnyOrder) {
  const auto first = split_all(comms_);
  const auto second = split_all(comms_);
  rank(0).signal_failure("a");
  for (const size_t r : {1u, 2u}) {
    EXPECT_EQ(barrier_error(*first[r]), "rank 0/3 failed: a");
    EXPECT_EQ(barrier_error(*second[r]), "rank 0/3 failed: a");
  }
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < 3; ++r) {
    ranks.emplace_back([&, r] {
      std::vector<Bytes> buffers(2, bytes_of<int32_t>({1}));
      const auto early = start_sum(*(r == 1 ? second : first)[r], buffers[0]);
      const auto late = start_sum(*(r == 1 ? first : second)[r], buffers[1]);
      late->wait();
      early->wait();
      EXPECT_EQ(buffers, std::vector<Bytes>(2, bytes_of<int32_t>({3})));
    });
  }
  for (std::thread& each : ranks) {
    each.join();
  }
}

TEST(GlooLeaving, FailsWhoWaits) {
  auto comms = join_all(make_world_of_gloo(2, kGlooLimit), 2);
  const auto begin = Clock::now();
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    comms[1].reset();
  });
  const std::string text = barrier_error(*comms[0]);
  peer.join();
  EXPECT_TRUE(contains(text, "rank 1/2 has ended without this call")) << text;
  EXPECT_LT(Clock::now() - begin, kSoon);
  EXPECT_TRUE(contains(barrier_error(*comms[0]), text));
}

TEST(GlooLeaving, OfAChildIsNoEndOfTheWorld) {
  const auto comms = join_all(make_world_of_gloo(3, kGlooLimit), 3);
  auto children = split_all(comms);
  const auto begin = Clock::now();
  children[1].reset();
  for (int i = 0; i < 2; ++i) { // in this epoch, and in the next one
    std::string texts[3];
    std::thread peer([&] { texts[2] = barrier_error(*children[2]); });
    texts[0] = barrier_error(*children[0]);
    peer.join();
    for (const int r : {0, 2}) { // its own text, or that of the other
      EXPECT_TRUE(contains(
          texts[r],
          "/3 waits for rank 1, gone without this call. Look for the first "
          "error there."))
          << texts[r];
      EXPECT_TRUE(contains(texts[r], "barrier of b: rank ")) << texts[r];
    }
  }
  EXPECT_LT(Clock::now() - begin, 2 * kSoon);
  EXPECT_EQ(comms[0]->aborted(), "");
  expect_all_meet(comms);
}

TEST(GlooLeaving, OfAChildKeepsWhatTheCallsOfAllHaveGiven) {
  const auto comms = join_all(make_world_of_gloo(2, kGlooLimit), 2);
  auto children = split_all(comms);
  std::vector<Bytes> buffers(2, Bytes(3 << 20));
  const auto first = start_sum(*children[0], buffers[0]);
  auto second = start_sum(*children[1], buffers[1]);
  children[1].reset();
  first->wait();
  second->wait();
  expect_all_meet(comms);
}

TEST(GlooLeaving, KeepsWhatTheCallsOfAllHaveGiven) {
  auto comms = join_all(make_world_of_gloo(2, kGlooLimit), 2);
  std::vector<Bytes> buffers(2, bytes_of<int32_t>({1}));
  const auto work = start_sum(*comms[0], buffers[0]);
  start_sum(*comms[1], buffers[1])->wait();
  comms[1].reset();
  comms[0].reset();
  work->wait();
  EXPECT_EQ(buffers[0], bytes_of<int32_t>({2}));
}

} // namespace
} // namespace fsdp::detail
