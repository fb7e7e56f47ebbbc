// A failure of a communicator reaches those that were split from it.

#include "comm/recording_communicator.h"
#include "comm/single_communicator.h"
#include "one_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>

namespace fsdp::detail {
namespace {

using Clock = std::chrono::steady_clock;

class FailureOfAParent : public testing::Test {
 protected:
  std::vector<Comm> world_ = make_ranks(3);
  std::vector<Comm> children_ = split_all(world_);
};

TEST_F(FailureOfAParent, ReachesAWaitInAChild) {
  const auto begin = Clock::now();
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    world_[1]->signal_failure("out of memory");
  });
  EXPECT_EQ(barrier_error(*children_[0]), "rank 1/3 failed: out of memory");
  peer.join();
  EXPECT_EQ(barrier_error(*children_[2]), "rank 1/3 failed: out of memory");
  EXPECT_LT(Clock::now() - begin, kAtOnce);
  expect_all_meet(children_);
  EXPECT_EQ(children_[0]->epoch(), 1u);
}

TEST_F(FailureOfAParent, CountsInEachGroupByItself) {
  children_[0]->signal_failure("earlier");
  EXPECT_EQ(barrier_error(*children_[1]), "rank 0/3 failed: earlier");
  EXPECT_EQ(barrier_error(*children_[2]), "rank 0/3 failed: earlier");
  const auto others = split_all(world_);
  world_[0]->signal_failure("a");
  EXPECT_EQ(world_[0]->epoch(), 1u);
  EXPECT_EQ(children_[0]->epoch(), 2u);
  EXPECT_EQ(others[0]->epoch(), 1u);
  for (size_t r : {1u, 2u}) {
    EXPECT_EQ(barrier_error(*children_[r]), "rank 0/3 failed: a");
    EXPECT_EQ(world_[r]->epoch(), 0u);
    EXPECT_EQ(others[r]->epoch(), 0u);
    EXPECT_EQ(barrier_error(*world_[r]), "rank 0/3 failed: a");
    EXPECT_EQ(barrier_error(*others[r]), "rank 0/3 failed: a");
  }
  expect_all_meet(world_);
  expect_all_meet(others);
  expect_all_meet(children_);
  EXPECT_EQ(children_[1]->epoch(), 2u);
}

TEST_F(FailureOfAParent, LeavesCallsInTheChildThatTheRankHasMade) {
  std::vector<Bytes> buffers(3, bytes_of<int32_t>({1}));
  start_sum(*children_[0], buffers[0]);
  world_[0]->signal_failure("a");
  const auto first = start_sum(*children_[1], buffers[1]);
  const auto second = start_sum(*children_[2], buffers[2]);
  first->wait();
  second->wait();
  EXPECT_EQ(buffers[1], bytes_of<int32_t>({3}));
  EXPECT_EQ(buffers[2], bytes_of<int32_t>({3}));
  EXPECT_EQ(barrier_error(*children_[1]), "rank 0/3 failed: a");
  EXPECT_EQ(barrier_error(*children_[2]), "rank 0/3 failed: a");
  expect_all_meet(children_);
}

TEST_F(FailureOfAParent, EndsTheWorksOfTheRankInItsChildren) {
  Bytes buffer = bytes_of<int32_t>({1});
  const auto work = start_sum(*children_[2], buffer);
  EXPECT_FALSE(work->ready());
  world_[2]->signal_failure("a");
  EXPECT_TRUE(work->ready());
  EXPECT_EQ(error_of([&] { work->wait(); }), "rank 2/3 failed: a");
}

TEST_F(FailureOfAParent, ReachesGrandchildrenWhoseParentIsGone) {
  const auto grandchildren = split_all(children_);
  children_.clear();
  split_all(world_); // forgets what is over
  world_[2]->signal_failure("a");
  EXPECT_EQ(barrier_error(*grandchildren[0]), "rank 2/3 failed: a");
  EXPECT_EQ(barrier_error(*grandchildren[1]), "rank 2/3 failed: a");
  expect_all_meet(grandchildren);
  EXPECT_EQ(grandchildren[2]->epoch(), 1u);
}

TEST_F(FailureOfAParent, OfAChildStaysBelowIt) {
  const auto grandchildren = split_all(children_);
  const auto siblings = split_all(world_);
  children_[1]->signal_failure("a");
  EXPECT_EQ(barrier_error(*grandchildren[0]), "rank 1/3 failed: a");
  EXPECT_EQ(barrier_error(*grandchildren[2]), "rank 1/3 failed: a");
  expect_all_meet(world_);
  expect_all_meet(siblings);
  EXPECT_EQ(world_[1]->epoch(), 0u);
  EXPECT_EQ(siblings[1]->epoch(), 0u);
}

TEST_F(FailureOfAParent, DoesNotReachChildrenMadeLater) {
  world_[0]->signal_failure("a");
  EXPECT_EQ(barrier_error(*world_[1]), "rank 0/3 failed: a");
  EXPECT_EQ(barrier_error(*world_[2]), "rank 0/3 failed: a");
  const auto later = split_all(world_);
  EXPECT_EQ(later[0]->epoch(), 0u);
  expect_all_meet(later);
}

TEST(FailureOfAParentOfTwoGroups, NamesTheRankOfTheParentInItsGroupOnly) {
  const auto world = make_ranks(4);
  // {0, 1} and, in reverse, {3, 2}.
  const auto halves = split_all(
      world, [](int rank) { return rank / 2; }, [](int rank) { return -rank; });
  EXPECT_EQ(halves[3]->rank(), 0);
  world[3]->signal_failure("a");
  EXPECT_EQ(barrier_error(*halves[2]), "rank 3/4 failed: a");
  expect_all_meet({halves[3], halves[2]});
  expect_all_meet({halves[1], halves[0]});
  EXPECT_EQ(halves[0]->epoch(), 0u);
  EXPECT_EQ(barrier_error(*world[0]), "rank 3/4 failed: a");
}

TEST(FailureOfAParentAlone, EndsTheEpochsBelowIt) {
  const std::vector<Comm> parents = {
      make_single_communicator(),
      std::make_shared<RecordingCommunicator>(1, 2),
      make_ranks(1)[0]};
  for (const Comm& parent : parents) {
    parent->signal_failure("before");
    const Comm child = parent->split(0, 0);
    const Comm grandchild = child->split(0, 0);
    EXPECT_EQ(grandchild->epoch(), 0u);
    child->signal_failure("a");
    parent->signal_failure("b");
    EXPECT_EQ(parent->epoch(), 2u);
    EXPECT_EQ(child->epoch(), 2u);
    EXPECT_EQ(grandchild->epoch(), 2u);
  }
}

class LeavingChildren : public testing::Test {
 protected:
  std::vector<Comm> world_ = make_ranks(2);
  std::vector<Comm> children_ = split_all(world_);
};

TEST_F(LeavingChildren, ByAnExceptionLetsThePeersWaitForItsText) {
  std::thread peer([this] {
    try {
      const auto mine = std::move(children_[1]);
      throw std::runtime_error("out of memory");
    } catch (const std::exception& error) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      world_[1]->signal_failure(error.what());
    }
  });
  const auto texts = barrier_errors(*children_[0], 3);
  EXPECT_EQ(texts[0], "rank 1/2 failed: out of memory");
  expect_gone(texts[1]);
  expect_gone(texts[2]);
  peer.join();
}

TEST_F(LeavingChildren, ByAnExceptionThatIsNeverSignalledFailsThePeersSoon) {
  std::thread peer([this] {
    try {
      const auto mine = std::move(children_[1]);
      throw std::runtime_error("out of memory");
    } catch (const std::exception&) {}
  });
  const auto texts = barrier_errors(*children_[0], 3);
  peer.join();
  for (const std::string& text : texts) {
    expect_gone(text);
  }
}

TEST_F(LeavingChildren, ByAnExceptionIsToldAtTheTimeOutToo) {
  world_ = make_ranks(2, std::chrono::milliseconds(100));
  children_ = split_all(world_);
  try {
    const auto mine = std::move(children_[1]);
    throw std::runtime_error("out of memory");
  } catch (const std::exception&) {}
  expect_gone(barrier_errors(*children_[0], 1)[0]);
}

} // namespace
} // namespace fsdp::detail
