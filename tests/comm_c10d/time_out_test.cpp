// What ends a world, and what is said then.

#include "comm/sample_data.h"
#include "gloo_world.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kShort(600);

std::string barrier_error(Communicator& comm, const std::string& what) {
  return error_of([&] { comm.barrier(what); });
}

TEST(GlooTimeOut, NamesTheCallTheRanksAndTheLimit) {
  const auto comms = join_all(make_world_of_gloo(4, kShort), 4);
  Bytes buffer(4);
  Bytes other(4);
  const std::string what = "all_gather of unit 'a'";
  const auto start = Clock::now();
  std::string peers_text;
  std::thread peer([&] {
    const auto work = comms[1]->all_gather(other, what);
    std::this_thread::sleep_for(milliseconds(200)); // rank 2 is first
    peers_text = error_of([&] { work->wait(); });
  });
  const auto work = comms[2]->all_gather(buffer, what);
  const std::string text = error_of([&] { work->wait(); });
  const auto waited = Clock::now() - start;
  peer.join();
  EXPECT_EQ(
      text,
      "all_gather of unit 'a': rank 2/4 timed out after 600 ms; not arrived: "
      "ranks 0, 3. Look for an error or a different path there, or raise the "
      "time limit if it is only slow.");
  EXPECT_GE(waited, kShort);
  EXPECT_LT(waited, kShort + milliseconds(1000));
  EXPECT_EQ(comms[2]->aborted(), text);
  // The others learn of it without waiting, and nothing works any more.
  EXPECT_EQ(peers_text, "aborted: " + text);
  for (const auto& comm : comms) {
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(barrier_error(*comm, "b"), "aborted: " + text);
    }
    EXPECT_EQ(comm->aborted(), text);
    comm->signal_failure("too late");
  }
  EXPECT_LT(Clock::now() - start, kShort + milliseconds(2000));
}

TEST(GlooTimeOut, SaysWhereTheOthersWait) {
  const auto comms = join_all(make_world_of_gloo(3, kShort), 3);
  const auto children = split_all(comms);
  std::vector<std::thread> peers;
  for (const size_t r : {1u, 2u}) {
    peers.emplace_back([&, r] { barrier_error(*children[r], "elsewhere"); });
  }
  std::this_thread::sleep_for(milliseconds(50));
  const std::string text = barrier_error(*comms[0], "start");
  for (std::thread& peer : peers) {
    peer.join();
  }
  // Whoever is first, names where the others are.
  const bool is_first = contains(
      text,
      "barrier of start: rank 0/3 timed out after 600 ms; not arrived: ranks 1 "
      "(waits in barrier of elsewhere), 2 (waits in barrier of elsewhere)");
  const bool is_told = contains(
      text,
      "/3 timed out after 600 ms; not arrived: rank 0 (waits in barrier of "
      "start)");
  EXPECT_TRUE(is_first || is_told) << text;
}

TEST(GlooTimeOut, EndsParentsAndSiblings) {
  const auto comms = join_all(make_world_of_gloo(2, milliseconds(200)), 2);
  const auto children = split_all(comms);
  const auto siblings = split_all(comms);
  const std::string text = barrier_error(*children[0], "start");
  EXPECT_TRUE(contains(text, "not arrived: rank 1.")) << text;
  EXPECT_EQ(barrier_error(*comms[0], "b"), "aborted: " + text);
  EXPECT_EQ(barrier_error(*siblings[0], "b"), "aborted: " + text);
  EXPECT_EQ(siblings[0]->aborted(), text);
}

TEST(GlooTimeOut, FreesTheMemoryOfLargeCalls) {
  const auto comms = join_all(make_world_of_gloo(2, milliseconds(200)), 2);
  Bytes buffer(4 << 20);
  const auto start = Clock::now();
  const auto work = comms[0]->all_gather(buffer, "a");
  EXPECT_TRUE(contains(error_of([&] { work->wait(); }), "timed out"));
  buffer = Bytes();
  EXPECT_LT(Clock::now() - start, milliseconds(2000));
}

TEST(GlooTimeOut, OfTheStartNamesWhoHasNotCome) {
  const auto join = make_world_of_gloo(3, kShort);
  std::string text;
  std::thread peer([&] { error_of([&] { join(2); }); });
  text = error_of([&] { join(0); });
  peer.join();
  EXPECT_TRUE(contains(text, "barrier of start of the world: rank ")) << text;
  EXPECT_TRUE(contains(text, "timed out after 600 ms; not arrived: rank 1"))
      << text;
}

TEST(GlooTimeOut, EndlessLimitsDoNotOverflow) {
  run_ranks(
      2,
      [](Communicator& comm) {
        Bytes buffer(1 << 20);
        comm.barrier("start");
        comm.all_gather(buffer, "a")->wait();
      },
      milliseconds::max());
}

class GlooMismatch : public testing::Test {
 protected:
  using Call = std::function<std::unique_ptr<Work>(Communicator&)>;

  // What all ranks throw when rank 1 calls `second` and the others `first`;
  // checks that they then meet again.
  void
  expect_error(const Call& first, const Call& second, const char* expected) {
    const auto start = Clock::now();
    run_ranks(2, [&](Communicator& comm) {
      const auto work = (comm.rank() == 1 ? second : first)(comm);
      EXPECT_EQ(error_of([&] { work->wait(); }), expected);
      EXPECT_EQ(comm.epoch(), 1u);
      comm.barrier("again");
    });
    EXPECT_LT(Clock::now() - start, milliseconds(3000));
  }

  static Call gather(size_t bytes, const std::string& what) {
    return [=](Communicator& comm) {
      return comm.all_gather(memory(bytes), what);
    };
  }

  static std::span<std::byte> memory(size_t bytes) {
    static thread_local Bytes bytes_of_rank(6 << 20);
    return std::span(bytes_of_rank).first(bytes);
  }
};

TEST_F(GlooMismatch, OfTheSizeIsAnErrorOnAllAndNoMixUp) {
  expect_error(
      gather(3 << 20, "unit 'a'"),
      gather(6 << 20, "unit 'a'"),
      "ranks differ: rank 1/2 calls all_gather of unit 'a' (6291456 bytes), "
      "rank 0/2 calls all_gather of unit 'a' (3145728 bytes). All ranks must "
      "call the same collectives in the same order.");
}

TEST_F(GlooMismatch, OfTheNameIsAnErrorOnAll) {
  expect_error(
      gather(30, "unit 'a'"),
      gather(30, "unit 'b'"),
      "ranks differ: rank 1/2 calls all_gather of unit 'b' (30 bytes), rank "
      "0/2 "
      "calls all_gather of unit 'a' (30 bytes). All ranks must call the same "
      "collectives in the same order.");
}

TEST_F(GlooMismatch, OfTheCollectiveIsAnErrorOnAll) {
  expect_error(
      gather(300'000, "unit 'a'"),
      [](Communicator& comm) {
        return comm.all_reduce(
            memory(600), DType::kFloat32, ReduceOp::kMax, "norm");
      },
      "ranks differ: rank 1/2 calls all_reduce of norm (600 bytes), rank 0/2 "
      "calls all_gather of unit 'a' (300000 bytes). All ranks must call the "
      "same collectives in the same order.");
}

} // namespace
} // namespace fsdp::detail
