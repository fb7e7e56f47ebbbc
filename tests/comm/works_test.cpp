#include "one_thread.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

TEST(Works, ReadyIsExact) {
  const auto comms = make_ranks(2);
  Bytes first(4);
  Bytes second(4);
  const auto work = comms[0]->all_gather(first, "a");
  EXPECT_FALSE(work->ready());
  const auto peer = comms[1]->all_gather(second, "a");
  EXPECT_TRUE(work->ready());
  EXPECT_TRUE(peer->ready());
  work->wait();
  EXPECT_TRUE(work->ready());
  work->wait();
}

TEST(Works, OutliveTheirCommunicator) {
  auto comms = make_ranks(2);
  Bytes first = bytes_of<int32_t>({1});
  Bytes second = bytes_of<int32_t>({2});
  const auto sum = ReduceOp::kSum;
  const auto work = comms[0]->all_reduce(first, DType::kInt32, sum, "a");
  comms[0].reset();
  comms[1]->all_reduce(second, DType::kInt32, sum, "a")->wait();
  comms.clear();
  work->wait();
  EXPECT_EQ(first, bytes_of<int32_t>({3}));
  EXPECT_EQ(second, bytes_of<int32_t>({3}));
}

} // namespace
} // namespace fsdp::detail
