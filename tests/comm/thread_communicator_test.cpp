// What only ranks that are threads do: go on after a time-out, and leave for
// good.

#include "comm/single_communicator.h"
#include "one_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;

TEST(ThreadCommunicator, NeedsARank) {
  EXPECT_EQ(
      error_of<std::invalid_argument>(
          [] { make_thread_communicators(0, std::chrono::seconds(1)); }),
      "thread communicators: expected at least 1 rank, but got 0");
}

TEST(TimeOut, NamesTheCallTheRanksAndTheLimit) {
  const auto comms = make_ranks(4, milliseconds(200));
  Bytes buffer(4);
  const std::string what = "all_gather of unit 'a'";
  const auto start = std::chrono::steady_clock::now();
  const auto peer = comms[1]->all_gather(buffer, what);
  const auto work = comms[2]->all_gather(buffer, what);
  const std::string text = error_of([&] { work->wait(); });
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(
      text,
      "all_gather of unit 'a': rank 2/4 timed out after 200 ms; not arrived: "
      "ranks 0, 3. Look for an error or a different path there, or raise the "
      "time limit if it is only slow.");
  EXPECT_GE(waited, milliseconds(200));
  EXPECT_LT(waited, milliseconds(2000));
  // The others learn of it without waiting, once.
  EXPECT_EQ(error_of([&] { peer->wait(); }), "rank 2/4 failed: " + text);
  EXPECT_EQ(
      error_of([&] { comms[0]->barrier("b"); }), "rank 2/4 failed: " + text);
  EXPECT_EQ(comms[3]->epoch(), 0u);
  EXPECT_EQ(
      error_of([&] { comms[3]->all_gather(buffer, what); }),
      "rank 2/4 failed: " + text);
  for (const auto& comm : comms) {
    EXPECT_EQ(comm->epoch(), 1u);
    EXPECT_EQ(comm->timeout(), milliseconds(200));
  }
}

TEST(TimeOut, OneSlowRankIsNamedAlone) {
  std::atomic<bool> is_over = false;
  run_ranks(
      3,
      [&](Communicator& comm) {
        while (comm.rank() == 1 && !is_over) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        const std::string text = error_of([&] { comm.barrier("start"); });
        EXPECT_TRUE(contains(text, "not arrived: rank 1. Look for")) << text;
        is_over = true;
        comm.barrier("again");
      },
      milliseconds(300));
}

TEST(TimeOut, OfARankAheadNamesWhoStaysBehind) {
  const auto comms = make_ranks(2, std::chrono::milliseconds(200));
  comms[0]->signal_failure("a");
  const std::string text = error_of([&] { comms[0]->barrier("next"); });
  EXPECT_TRUE(contains(text, "not arrived: rank 1")) << text;
  EXPECT_EQ(error_of([&] { comms[1]->barrier("b"); }), "rank 0/2 failed: a");
  EXPECT_EQ(
      error_of([&] { comms[1]->barrier("b"); }), "rank 0/2 failed: " + text);
  EXPECT_EQ(comms[0]->epoch(), comms[1]->epoch());
}

class LeavingForGood : public testing::Test {
 protected:
  std::vector<Comm> world_ = make_ranks(2);
  std::vector<Comm> children_ = split_all(world_);
};

TEST_F(LeavingForGood, FailsThePeersEveryTimeInAllGroups) {
  const auto grandchildren = split_all(children_);
  world_[1]->signal_failure("a");
  leave_for_good(*world_[1]);
  for (Communicator* comm :
       {world_[0].get(), children_[0].get(), grandchildren[0].get()}) {
    const auto texts = barrier_errors(*comm, 3);
    EXPECT_EQ(texts[0], "rank 1/2 failed: a");
    expect_gone(texts[1]);
    expect_gone(texts[2]);
  }
}

TEST_F(LeavingForGood, EndsAWaitInAChild) {
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    leave_for_good(*world_[1]);
  });
  expect_gone(barrier_errors(*children_[0], 1)[0]);
  peer.join();
}

TEST(LeavingForGoodOfOthers, NeedsACommunicatorOfThreads) {
  const auto text = error_of<std::invalid_argument>(
      [] { leave_for_good(*make_single_communicator()); });
  EXPECT_TRUE(contains(text, "expected a communicator of threads")) << text;
}

} // namespace
} // namespace fsdp::detail
