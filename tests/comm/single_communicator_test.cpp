#include "comm/single_communicator.h"

#include "sample_data.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fsdp::detail {
namespace {

TEST(SingleCommunicator, EveryCollectiveIsCompleteAtOnce) {
  const auto comm = make_single_communicator();
  EXPECT_EQ(comm->rank(), 0);
  EXPECT_EQ(comm->size(), 1);
  const Bytes data = sample(DType::kFloat16, 9, 1);
  Bytes buffer = data;
  const auto gather = comm->all_gather(buffer, "a");
  EXPECT_TRUE(gather->ready());
  gather->wait();
  comm->all_reduce(buffer, DType::kFloat16, ReduceOp::kSum, "a")->wait();
  comm->broadcast(buffer, 0, "a")->wait();
  comm->barrier("a");
  EXPECT_EQ(buffer, data);
  EXPECT_EQ(comm->exchange("mine", "a"), std::vector<std::string>{"mine"});
}

TEST(SingleCommunicator, ReduceScatterCopies) {
  const auto comm = make_single_communicator();
  for (int64_t numel : {0, 1, 7}) {
    const std::vector<int64_t> cuts = {0, numel};
    const Bytes input = sample(DType::kInt64, numel, 1);
    Bytes output(input.size());
    comm->reduce_scatter(input, output, DType::kInt64, cuts, "a")->wait();
    EXPECT_EQ(output, input);
  }
}

TEST(SingleCommunicator, ChecksItsArguments) {
  const auto comm = make_single_communicator();
  Bytes buffer(10);
  const std::vector<int64_t> cuts = {0, 2};
  EXPECT_EQ(
      error_of<std::invalid_argument>(
          [&] { comm->broadcast(buffer, 1, "seed"); }),
      "broadcast of seed: expected a root from 0 to 0, but got 1");
  EXPECT_THROW(
      comm->all_reduce(buffer, DType::kFloat64, ReduceOp::kSum, "a"),
      std::invalid_argument);
  EXPECT_THROW(
      comm->reduce_scatter(buffer, buffer, DType::kInt32, cuts, "a"),
      std::invalid_argument);
}

TEST(SingleCommunicator, CountsItsFailuresAndSplitsIntoItself) {
  const auto comm = make_single_communicator();
  comm->signal_failure("a");
  comm->signal_failure("b");
  EXPECT_EQ(comm->epoch(), 2u);
  const auto child = comm->split(3, 1);
  EXPECT_EQ(child->size(), 1);
  EXPECT_EQ(child->epoch(), 0u);
}

} // namespace
} // namespace fsdp::detail
