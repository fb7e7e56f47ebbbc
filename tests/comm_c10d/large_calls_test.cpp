// Calls that work on the caller's memory.

#include "comm/sample_data.h"
#include "gloo_world.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::detail {
namespace {

constexpr int64_t kNumel = 40'003; // more than is copied, in every dtype

std::vector<Bytes> large_inputs(int size, DType dtype) {
  std::vector<Bytes> inputs;
  for (int r = 0; r < size; ++r) {
    inputs.push_back(sample(dtype, kNumel, static_cast<uint64_t>(r + 7)));
  }
  return inputs;
}

class LargeCalls : public testing::TestWithParam<int> {};

TEST_P(LargeCalls, AllGatherFillsTheSlicesOfTheOthers) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const Bytes all = sample_bytes(kNumel * comm.size(), 5);
    Bytes buffer(all.size());
    const int64_t first = kNumel * comm.rank();
    std::copy_n(all.begin() + first, kNumel, buffer.begin() + first);
    comm.all_gather(buffer, "all_gather of unit 'a'")->wait();
    EXPECT_EQ(buffer, all);
  });
}

TEST_P(LargeCalls, ReduceScatterSumsUnevenParts) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (const DType dtype : kAllDTypes) {
      const auto inputs = large_inputs(comm.size(), dtype);
      std::vector<int64_t> cuts = {0};
      for (int64_t r = 1; r < comm.size(); ++r) { // the first part is empty
        cuts.push_back(kNumel * (r - 1) / comm.size());
      }
      cuts.push_back(kNumel);
      const auto r = static_cast<size_t>(comm.rank());
      const Bytes sum = reference_reduce(ReduceOp::kSum, dtype, inputs);
      const Bytes expected(
          sum.begin() + cuts[r] * size_of(dtype),
          sum.begin() + cuts[r + 1] * size_of(dtype));
      Bytes output(expected.size());
      comm.reduce_scatter(inputs[r], output, dtype, cuts, "unit 'a'")->wait();
      EXPECT_EQ(output, expected);
    }
  });
}

TEST_P(LargeCalls, AllReduceGivesTheSameBitsToAll) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (const DType dtype : kAllDTypes) {
      const auto inputs = large_inputs(comm.size(), dtype);
      Bytes buffer = inputs[static_cast<size_t>(comm.rank())];
      comm.all_reduce(buffer, dtype, ReduceOp::kSum, "norm")->wait();
      EXPECT_EQ(buffer, reference_reduce(ReduceOp::kSum, dtype, inputs));
    }
  });
}

TEST_P(LargeCalls, BroadcastCopiesTheRoot) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const int root = comm.size() - 1;
    Bytes buffer = sample_bytes(kNumel, static_cast<uint64_t>(comm.rank()));
    comm.broadcast(buffer, root, "weights")->wait();
    EXPECT_EQ(buffer, sample_bytes(kNumel, static_cast<uint64_t>(root)));
  });
}

TEST_P(LargeCalls, ExchangeKeepsTextsOfAnyLength) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const auto text =
        [](int rank) { // around the size of a block, and far above
          const int lengths[] = {1015, 1016, 1017, 100'000, 0};
          return std::string(static_cast<size_t>(lengths[rank]), 'a') + "z";
        };
    const auto all = comm.exchange(text(comm.rank()), "names");
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_EQ(all[static_cast<size_t>(r)], text(r));
    }
  });
}

TEST_P(LargeCalls, MayBeInFlightTogether) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const auto inputs = large_inputs(comm.size(), DType::kFloat32);
    const Bytes sum = reference_reduce(ReduceOp::kSum, DType::kFloat32, inputs);
    std::vector<Bytes> buffers(4, inputs[static_cast<size_t>(comm.rank())]);
    std::vector<std::unique_ptr<Work>> works;
    for (Bytes& buffer : buffers) {
      works.push_back(
          comm.all_reduce(buffer, DType::kFloat32, ReduceOp::kSum, "bucket"));
    }
    for (size_t i = 0; i < works.size(); ++i) { // each rank in its own order
      works[(i + static_cast<size_t>(comm.rank())) % works.size()]->wait();
    }
    for (const Bytes& buffer : buffers) {
      EXPECT_EQ(buffer, sum);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    LargeCalls,
    testing::Range(1, 6),
    testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::detail
