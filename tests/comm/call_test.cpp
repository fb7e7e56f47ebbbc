#include "comm/call.h"

#include "comm/recording_communicator.h"
#include "comm/single_communicator.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fsdp::detail {
namespace {

// Wrong arguments are errors on the rank itself, whichever the back end.
class Arguments : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string kind = GetParam();
    if (kind == "Thread") {
      comm_ = make_thread_communicators(3, std::chrono::seconds(1))[1];
    } else {
      comm_ = std::make_shared<RecordingCommunicator>(1, 3);
    }
  }

  std::string scatter_error(
      std::vector<int64_t> cuts,
      size_t input_bytes,
      size_t output_bytes) {
    std::vector<std::byte> input(input_bytes);
    std::vector<std::byte> output(output_bytes);
    return error_of<std::invalid_argument>([&] {
      comm_->reduce_scatter(input, output, DType::kFloat32, cuts, "unit 'a'");
    });
  }

  std::shared_ptr<Communicator> comm_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(10);
};

TEST_P(Arguments, AllGatherNeedsEqualSlices) {
  EXPECT_EQ(
      error_of<std::invalid_argument>(
          [&] { comm_->all_gather(buffer_, "all_gather of unit 'a'"); }),
      "all_gather of unit 'a': expected a buffer of 3 equal slices, but got "
      "10 bytes");
}

TEST_P(Arguments, ReductionsNeedWholeElements) {
  EXPECT_EQ(
      error_of<std::invalid_argument>([&] {
        comm_->all_reduce(buffer_, DType::kFloat32, ReduceOp::kMax, "norm");
      }),
      "all_reduce of norm: expected whole elements of float32, but got 10 "
      "bytes");
  EXPECT_TRUE(contains(
      scatter_error({0, 1, 2, 2}, 10, 4),
      "reduce_scatter of unit 'a': expected whole elements of float32"));
}

TEST_P(Arguments, CutsMustCoverTheInput) {
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{},
        {0, 1, 2},
        {0, 1, 2, 4},
        {1, 1, 2, 3},
        {0, 2, 1, 3},
        {0, 1, 2, 3, 3}}) {
    EXPECT_TRUE(contains(
        scatter_error(cuts, 12, 4),
        "expected 4 non-decreasing cuts from 0 to 3, but got cuts ["));
  }
}

TEST_P(Arguments, OutputMustHoldThePart) {
  EXPECT_EQ(
      scatter_error({0, 1, 3, 3}, 12, 4),
      "reduce_scatter of unit 'a': expected an output of 8 bytes, but got 4");
}

TEST_P(Arguments, RootMustBeARank) {
  for (int root : {-1, 3}) {
    EXPECT_EQ(
        error_of<std::invalid_argument>(
            [&] { comm_->broadcast(buffer_, root, "seed"); }),
        "broadcast of seed: expected a root from 0 to 2, but got " +
            std::to_string(root));
  }
}

INSTANTIATE_TEST_SUITE_P(
    BackEnds,
    Arguments,
    testing::Values("Thread", "Recording"),
    [](const auto& back_end) { return back_end.param; });

TEST(Call, TitleNamesTheCollectiveOnce) {
  EXPECT_EQ(
      title_of(CallKind::kAllGather, "unit 'a'"), "all_gather of unit 'a'");
  EXPECT_EQ(
      title_of(CallKind::kAllGather, "all_gather of unit 'a'"),
      "all_gather of unit 'a'");
  EXPECT_EQ(title_of(CallKind::kSplit, "split"), "split");
}

} // namespace
} // namespace fsdp::detail
