#include "one_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::detail {
namespace {

class Failure : public testing::Test {
 protected:
  Communicator& rank(size_t r) { return *comms_[r]; }

  std::vector<Comm> comms_ = make_ranks(3);
  Bytes buffer_ = bytes_of<int32_t>({1});
};

TEST_F(Failure, ReachesTheNextCallOfEachPeerOnce) {
  rank(1).signal_failure("out of memory");
  EXPECT_EQ(rank(1).epoch(), 1u);
  EXPECT_EQ(rank(0).epoch(), 0u);
  EXPECT_EQ(barrier_error(rank(0)), "rank 1/3 failed: out of memory");
  EXPECT_EQ(
      error_of([&] { start_sum(rank(2), buffer_); }),
      "rank 1/3 failed: out of memory");
  expect_all_meet(comms_);
  EXPECT_EQ(rank(0).epoch(), 1u);
}

TEST_F(Failure, ReachesAWaitThatIsPending) {
  const auto work = start_sum(rank(0), buffer_);
  EXPECT_FALSE(work->ready());
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    rank(1).signal_failure("out of memory");
  });
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 1/3 failed: out of memory");
  peer.join();
  EXPECT_TRUE(contains(barrier_error(rank(2)), "out of memory"));
  expect_all_meet(comms_);
}

TEST_F(Failure, BetweenIssueAndWait) {
  const auto work = start_sum(rank(0), buffer_);
  rank(1).signal_failure("a");
  EXPECT_TRUE(work->ready());
  EXPECT_EQ(rank(0).epoch(), 0u);
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 1/3 failed: a");
  EXPECT_EQ(rank(0).epoch(), 1u);
  EXPECT_EQ(barrier_error(rank(2)), "rank 1/3 failed: a");
  expect_all_meet(comms_);
}

TEST_F(Failure, AllWorksOfTheEndedEpochThrowItAndCountOnce) {
  Bytes other = buffer_;
  const auto first = start_sum(rank(0), buffer_);
  const auto second = start_sum(rank(0), other);
  rank(2).signal_failure("a");
  EXPECT_EQ(error_of([&] { second->wait(); }), "rank 2/3 failed: a");
  EXPECT_EQ(barrier_error(rank(1)), "rank 2/3 failed: a");
  expect_all_meet(comms_);
  EXPECT_TRUE(first->ready());
  EXPECT_EQ(error_of([&] { first->wait(); }), "rank 2/3 failed: a");
  EXPECT_EQ(error_of([&] { second->wait(); }), "rank 2/3 failed: a");
  expect_all_meet(comms_);
  EXPECT_EQ(rank(0).epoch(), 1u);
}

TEST_F(Failure, OwnWorksThrowTheOwnFailure) {
  const auto work = start_sum(rank(0), buffer_);
  rank(0).signal_failure("a");
  EXPECT_TRUE(work->ready());
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 0/3 failed: a");
  EXPECT_EQ(rank(0).epoch(), 1u);
}

TEST_F(Failure, LeavesCallsThatTheFailedRankHasMade) {
  std::vector<Bytes> buffers(3, bytes_of<int32_t>({1}));
  start_sum(rank(0), buffers[0])->ready();
  const auto first = start_sum(rank(1), buffers[1]);
  rank(0).signal_failure("a");
  EXPECT_FALSE(first->ready());
  start_sum(rank(2), buffers[2])->wait(); // after the failure
  first->wait();
  EXPECT_EQ(buffers[1], bytes_of<int32_t>({3}));
  EXPECT_EQ(buffers[2], bytes_of<int32_t>({3}));
  EXPECT_EQ(barrier_error(rank(1)), "rank 0/3 failed: a");
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: a");
  expect_all_meet(comms_);
}

TEST_F(Failure, OfARankFurtherBehindEndsCallsBeforeTheFirstFailure) {
  start_sum(rank(0), buffer_)->ready();
  start_sum(rank(0), buffer_)->ready();
  rank(0).signal_failure("first");
  const auto work = start_sum(rank(1), buffer_);
  EXPECT_FALSE(work->ready());
  rank(2).signal_failure("second");
  EXPECT_TRUE(work->ready());
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 0/3 failed: first");
  expect_all_meet(comms_);
}

TEST_F(Failure, TwiceInARowReachesThePeersOneByOne) {
  rank(0).signal_failure("first");
  rank(0).signal_failure("second");
  EXPECT_EQ(rank(0).epoch(), 2u);
  for (size_t r : {1u, 2u}) {
    EXPECT_EQ(barrier_error(rank(r)), "rank 0/3 failed: first");
    EXPECT_EQ(barrier_error(rank(r)), "rank 0/3 failed: second");
  }
  expect_all_meet(comms_);
  EXPECT_EQ(rank(1).epoch(), 2u);
}

TEST_F(Failure, FirstOfAnEpochWins) {
  rank(0).signal_failure("first");
  rank(1).signal_failure("second");
  EXPECT_EQ(rank(1).epoch(), 1u);
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: first");
  expect_all_meet(comms_);
}

TEST_F(Failure, OfAnOldEpochDoesNotReachTheNewOne) {
  rank(0).signal_failure("old");
  EXPECT_EQ(barrier_error(rank(1)), "rank 0/3 failed: old");
  const auto work = start_sum(rank(1), buffer_); // of epoch 1
  rank(2).signal_failure("late");                // of epoch 0
  EXPECT_FALSE(work->ready());
  Bytes zero = bytes_of<int32_t>({1});
  Bytes two = bytes_of<int32_t>({1});
  start_sum(rank(0), zero)->ready();
  start_sum(rank(2), two)->wait();
  work->wait();
  EXPECT_EQ(buffer_, bytes_of<int32_t>({3}));
  EXPECT_EQ(two, buffer_);
}

TEST_F(Failure, OfANewEpochWaitsForThoseInTheOldOne) {
  rank(0).signal_failure("old");
  EXPECT_EQ(barrier_error(rank(1)), "rank 0/3 failed: old");
  rank(1).signal_failure("new");
  EXPECT_EQ(barrier_error(rank(0)), "rank 1/3 failed: new");
  EXPECT_EQ(barrier_error(rank(2)), "rank 0/3 failed: old");
  EXPECT_EQ(barrier_error(rank(2)), "rank 1/3 failed: new");
  expect_all_meet(comms_);
}

TEST_F(Failure, CallsOfTheEndedEpochAreForgotten) {
  start_sum(rank(0), buffer_);
  start_sum(rank(0), buffer_);
  start_sum(rank(1), buffer_);
  rank(2).signal_failure("a");
  EXPECT_EQ(barrier_error(rank(0)), "rank 2/3 failed: a");
  EXPECT_EQ(barrier_error(rank(1)), "rank 2/3 failed: a");
  expect_all_meet(comms_);
}

TEST_F(Failure, OfOneRankAlone) {
  const auto comms = make_ranks(1);
  comms[0]->signal_failure("a");
  EXPECT_EQ(comms[0]->epoch(), 1u);
  comms[0]->barrier("b");
}

} // namespace
} // namespace fsdp::detail
