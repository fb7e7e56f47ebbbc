#include "comm/failing_communicator.h"

#include "comm/recording_communicator.h"
#include "sample_data.h"
#include "thread_world.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

using Lines = std::vector<std::string>;
using Moment = FailurePlan::Moment;

class FailingCommunicator : public testing::Test {
 protected:
  void plan(FailurePlan plan) {
    comm_ = make_failing_communicator(inner_, std::move(plan));
  }

  std::unique_ptr<Work> gather(const std::string& what) {
    return comm_->all_gather(buffer_, what);
  }

  std::string error(const std::string& what) {
    return error_of([&] { gather(what)->wait(); });
  }

  Bytes buffer_ = Bytes(8);
  std::shared_ptr<RecordingCommunicator> inner_ =
      std::make_shared<RecordingCommunicator>(1, 2);
  std::shared_ptr<Communicator> comm_;
};

TEST_F(FailingCommunicator, FailsTheNthMatchingCallOnce) {
  plan({.what = "unit 'b'", .nth = 2, .text = "cable cut"});
  EXPECT_EQ(error("unit 'b'"), "no error");
  EXPECT_EQ(error("unit 'a'"), "no error");
  EXPECT_EQ(error("all_gather of unit 'b'"), "cable cut");
  EXPECT_EQ(error("unit 'b'"), "no error");
  EXPECT_EQ(comm_->epoch(), 1u);
  EXPECT_EQ(
      inner_->lines(),
      (Lines{
          "all_gather unit 'b' 8 bytes",
          "all_gather unit 'a' 8 bytes",
          "signal_failure cable cut",
          "all_gather unit 'b' 8 bytes"}));
}

TEST_F(FailingCommunicator, MayFailAgainAndAgain) {
  plan({.what = "a", .nth = 2, .repeat = true});
  EXPECT_EQ(error("a"), "no error");
  EXPECT_EQ(error("a"), "injected failure");
  EXPECT_EQ(error("a"), "injected failure");
  EXPECT_EQ(error("b"), "no error");
  EXPECT_EQ(comm_->epoch(), 2u);
}

TEST_F(FailingCommunicator, MayFailInTheWait) {
  plan({.what = "a", .moment = Moment::kWait});
  const auto work = gather("a");
  EXPECT_TRUE(work->ready());
  EXPECT_EQ(comm_->epoch(), 0u);
  EXPECT_EQ(error_of([&] { work->wait(); }), "injected failure");
  EXPECT_EQ(error_of([&] { work->wait(); }), "injected failure");
  EXPECT_EQ(comm_->epoch(), 1u);
  EXPECT_EQ(inner_->lines().front(), "all_gather a 8 bytes");
}

TEST_F(FailingCommunicator, PassesOnEveryKindOfCall) {
  plan({.what = "never"});
  const std::vector<int64_t> cuts = {0, 1, 2};
  Bytes part(4);
  comm_->reduce_scatter(buffer_, part, DType::kFloat32, cuts, "a")->wait();
  comm_->all_reduce(buffer_, DType::kInt64, ReduceOp::kMax, "a")->wait();
  comm_->broadcast(buffer_, 1, "a")->wait();
  comm_->barrier("a");
  EXPECT_EQ(comm_->exchange("x", "a").size(), 2u);
  EXPECT_EQ(comm_->split(0, 0)->size(), 2);
  comm_->signal_failure("text");
  EXPECT_EQ(comm_->rank(), 1);
  EXPECT_EQ(comm_->size(), 2);
  EXPECT_EQ(comm_->timeout(), inner_->timeout());
  EXPECT_EQ(
      inner_->lines(),
      (Lines{
          "reduce_scatter a 8 bytes float32 sum",
          "all_reduce a 8 bytes int64 max",
          "broadcast a 8 bytes root 1",
          "barrier a",
          "exchange a",
          "split color 0 key 0",
          "signal_failure text"}));
}

TEST_F(FailingCommunicator, FailsBlockingCallsToo) {
  plan({.what = "", .repeat = true, .moment = Moment::kWait});
  EXPECT_EQ(error_of([&] { comm_->barrier("a"); }), "injected failure");
  EXPECT_EQ(error_of([&] { comm_->exchange("x", "a"); }), "injected failure");
  plan({.what = "split"});
  EXPECT_EQ(error_of([&] { comm_->split(0, 0); }), "injected failure");
}

TEST(FailingWorld, PeersGetTheFailureAndAllMeetAgain) {
  run_ranks(3, [](Communicator& world) {
    // Not owned: it lives as long as the rank's body.
    std::shared_ptr<Communicator> comm(&world, [](Communicator*) {});
    if (comm->rank() == 1) {
      comm = make_failing_communicator(
          comm, {.what = "second", .text = "cable cut"});
    }
    comm->barrier("first");
    EXPECT_EQ(
        error_of([&] { comm->barrier("second"); }),
        comm->rank() == 1 ? "cable cut" : "rank 1/3 failed: cable cut");
    comm->barrier("second");
    EXPECT_EQ(comm->epoch(), 1u);
  });
}

} // namespace
} // namespace fsdp::detail
