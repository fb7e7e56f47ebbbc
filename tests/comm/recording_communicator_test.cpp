#include "comm/recording_communicator.h"

#include "sample_data.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fsdp::detail {
namespace {

using Lines = std::vector<std::string>;

TEST(RecordingCommunicator, WritesALinePerCall) {
  RecordingCommunicator comm(2, 4);
  Bytes buffer(64);
  Bytes part(16);
  const std::vector<int64_t> cuts = {0, 4, 8, 12, 16};
  comm.all_gather(buffer, "unit 'b'")->wait();
  comm.all_gather(buffer, "all_gather of unit 'b'");
  comm.reduce_scatter(
      buffer, part, DType::kFloat32, cuts, "unit 'b'", ReduceOp::kSum);
  comm.all_reduce(buffer, DType::kFloat64, ReduceOp::kMax, "norm");
  comm.broadcast(part, 3, "seed");
  comm.barrier("start");
  comm.exchange("x", "names");
  comm.signal_failure("out of memory");
  EXPECT_EQ(
      comm.lines(),
      (Lines{
          "all_gather unit 'b' 64 bytes",
          "all_gather of unit 'b' 64 bytes",
          "reduce_scatter unit 'b' 64 bytes float32 sum",
          "all_reduce norm 64 bytes float64 max",
          "broadcast seed 16 bytes root 3",
          "barrier start",
          "exchange names",
          "signal_failure out of memory"}));
  EXPECT_EQ(comm.epoch(), 1u);
  comm.clear();
  EXPECT_TRUE(comm.lines().empty());
}

TEST(RecordingCommunicator, KeepsTheOwnContribution) {
  RecordingCommunicator comm(1, 3);
  const Bytes data = sample_bytes(24, 1);
  Bytes buffer = data;
  const auto work = comm.all_gather(buffer, "a");
  EXPECT_TRUE(work->ready());
  comm.all_reduce(buffer, DType::kInt32, ReduceOp::kSum, "a")->wait();
  comm.broadcast(buffer, 0, "a")->wait();
  EXPECT_EQ(buffer, data);
  Bytes part(12);
  const std::vector<int64_t> cuts = {0, 1, 4, 6};
  comm.reduce_scatter(data, part, DType::kInt32, cuts, "a", ReduceOp::kSum)
      ->wait();
  EXPECT_EQ(part, Bytes(data.begin() + 4, data.begin() + 16));
  EXPECT_EQ(comm.exchange("me", "a"), (Lines{"me", "me", "me"}));
}

TEST(RecordingCommunicator, ChildrenWriteToTheSameLines) {
  RecordingCommunicator comm(5, 8);
  const auto same = comm.split(0, 1);
  EXPECT_EQ(same->rank(), 5);
  EXPECT_EQ(same->size(), 8);
  comm.set_next_split(1, 2);
  const auto child = comm.split(3, 5);
  EXPECT_EQ(child->rank(), 1);
  EXPECT_EQ(child->size(), 2);
  child->barrier("start");
  child->split(1, 0)->barrier("inner");
  EXPECT_EQ(
      comm.lines(),
      (Lines{
          "split color 0 key 1",
          "split color 3 key 5",
          "color 3: barrier start",
          "color 3: split color 1 key 0",
          "color 3: color 1: barrier inner"}));
  EXPECT_EQ(comm.split(0, 0)->size(), 8);
}

TEST(RecordingCommunicator, NeedsARankOfItsWorld) {
  EXPECT_EQ(
      error_of<std::invalid_argument>([] { RecordingCommunicator(4, 4); }),
      "RecordingCommunicator: expected a rank below the size, but got rank "
      "4/4");
}

} // namespace
} // namespace fsdp::detail
