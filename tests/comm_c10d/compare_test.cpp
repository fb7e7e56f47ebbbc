// Comparing every call before it runs.

#include "comm/sample_data.h"
#include "gloo_world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::detail {
namespace {

void on_ranks(int size, const std::function<void(Communicator&)>& body) {
  const auto join = make_world_of_gloo(size, kGlooLimit, CompareCalls::kYes);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      EXPECT_EQ(error_of([&] { body(*join(rank)); }), "no error");
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(ComparedCalls, GiveTheSameResults) {
  on_ranks(3, [](Communicator& comm) {
    std::vector<Bytes> inputs;
    for (uint64_t r = 0; r < 3; ++r) {
      inputs.push_back(sample(DType::kFloat32, 50'000, r));
    }
    const auto sum = reference_reduce(ReduceOp::kSum, DType::kFloat32, inputs);
    std::vector<Bytes> buffers(2, inputs[static_cast<size_t>(comm.rank())]);
    std::vector<std::unique_ptr<Work>> works;
    for (Bytes& buffer : buffers) {
      works.push_back(
          comm.all_reduce(buffer, DType::kFloat32, ReduceOp::kSum, "bucket"));
    }
    works[1]->wait();
    works[0]->wait();
    EXPECT_EQ(buffers, std::vector<Bytes>(2, sum));
    EXPECT_EQ(comm.exchange(std::string(3000, 'x'), "names")[2].size(), 3000u);
  });
}

TEST(ComparedCalls, TellADifferenceAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(3, [](Communicator& comm) {
    std::vector<int64_t> cuts = {0, 8, 16, 24};
    cuts[1] += comm.rank() == 2 ? 1 : 0;
    Bytes input(24 * 4);
    const auto r = static_cast<size_t>(comm.rank());
    Bytes output(static_cast<size_t>(4 * (cuts[r + 1] - cuts[r])));
    const auto text = error_of([&] {
      comm.reduce_scatter(input, output, DType::kFloat32, cuts, "unit 'a'")
          ->wait();
    });
    EXPECT_TRUE(contains(text, "ranks differ: rank 2/3 calls")) << text;
    EXPECT_TRUE(contains(text, "sum, cuts [0, 9, 16, 24])")) << text;
    EXPECT_TRUE(contains(text, "sum, cuts [0, 8, 16, 24])")) << text;
    EXPECT_EQ(comm.epoch(), 1u);
    comm.barrier("again");
  });
  // Far below the second after which waiting ranks compare by themselves.
  EXPECT_LT(
      std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(800));
}

} // namespace
} // namespace fsdp::detail
