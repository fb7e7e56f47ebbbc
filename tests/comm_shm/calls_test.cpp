// Calls that shared memory does in ways of its own, or ends in ways of its own.

#include "comm/one_thread.h"
#include "shm_world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// Repeats itself, as do sums of it: samples take long to draw.
Bytes long_sample(DType dtype, int64_t numel, uint64_t seed) {
  const Bytes period = sample(dtype, std::min<int64_t>(numel, 5003), seed);
  Bytes bytes(static_cast<size_t>(numel * size_of(dtype)));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = period[i % period.size()];
  }
  return bytes;
}

std::vector<Bytes> long_samples(
    const Communicator& comm,
    DType dtype,
    int64_t numel,
    uint64_t seed) {
  std::vector<Bytes> samples;
  for (int r = 0; r < comm.size(); ++r) {
    samples.push_back(
        long_sample(dtype, numel, seed + static_cast<uint64_t>(r)));
  }
  return samples;
}

// Larger ones are reduced part by part.
TEST(LargeAllReduce, GivesTheResultsOfThePlainReference) {
  run_ranks(4, [](Communicator& comm) {
    for (const DType dtype : kAllDTypes) {
      for (const int64_t bytes : {32 << 10, (32 << 10) + 8, 300'008}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          const auto inputs =
              long_samples(comm, dtype, bytes / size_of(dtype), 3);
          Bytes buffer = inputs[static_cast<size_t>(comm.rank())];
          comm.all_reduce(buffer, dtype, op, "sum")->wait();
          ASSERT_EQ(buffer, reference_reduce(op, dtype, inputs));
        }
      }
    }
  });
}

// Some ranks let go of the handle at once, and then of the buffer. The others
// get their results all the same.
TEST(LargeAllReduce, NeedsNoHandleOfTheOthers) {
  run_ranks(4, [](Communicator& comm) {
    std::mt19937 plan(3); // the same on all ranks
    for (int call = 0; call < 60; ++call) {
      const int64_t numel = 1 + static_cast<int64_t>(plan() % 60'000);
      const auto keepers = plan() % 16;
      const auto inputs =
          long_samples(comm, DType::kFloat32, numel, plan() % 1000);
      auto buffer =
          std::make_unique<Bytes>(inputs[static_cast<size_t>(comm.rank())]);
      auto work =
          comm.all_reduce(*buffer, DType::kFloat32, ReduceOp::kSum, "sum");
      if ((keepers >> comm.rank() & 1) != 0) {
        work->wait();
        const auto expected =
            reference_reduce(ReduceOp::kSum, DType::kFloat32, inputs);
        ASSERT_EQ(*buffer, expected) << call;
      }
      work.reset();
      buffer.reset();
      if (call % 10 == 9) {
        comm.barrier("all are here");
      }
    }
  });
}

// There is room for two of them, and no more.
TEST(ManyCalls, MayWaitForRoom) {
  run_ranks(3, [](Communicator& comm) {
    constexpr size_t kBytes = 100'000;
    constexpr size_t kCalls = 20;
    const auto mine = static_cast<size_t>(comm.rank());
    std::vector<Bytes> buffers(kCalls, Bytes(3 * kBytes));
    std::vector<std::unique_ptr<Work>> works;
    for (size_t i = 0; i < kCalls; ++i) {
      std::fill_n(&buffers[i][mine * kBytes], kBytes, std::byte(10 * i + mine));
      works.push_back(comm.all_gather(buffers[i], std::to_string(i)));
      if (i % 3 == mine) { // wants no result
        works.back().reset();
        buffers[i] = Bytes();
      }
    }
    for (size_t i = kCalls; i-- > 0;) {
      if (works[i] == nullptr) {
        continue;
      }
      works[i]->wait();
      for (size_t r = 0; r < 3; ++r) {
        const auto expected = std::byte(10 * i + r);
        ASSERT_EQ(buffers[i][r * kBytes], expected) << i;
        ASSERT_EQ(buffers[i][(r + 1) * kBytes - 1], expected) << i;
      }
    }
    comm.barrier("all are done");
  });
}

TEST(ManyCalls, MayBeInFlight) {
  run_ranks(3, [](Communicator& comm) {
    constexpr int32_t kCalls = 300;
    std::vector<Bytes> buffers;
    std::vector<std::unique_ptr<Work>> works;
    buffers.reserve(kCalls);
    for (int32_t i = 0; i < kCalls; ++i) {
      buffers.push_back(bytes_of<int32_t>({i + comm.rank()}));
      works.push_back(start_sum(comm, buffers.back()));
    }
    for (int32_t i = kCalls; i-- > 0;) {
      const auto at = static_cast<size_t>(i);
      works[at]->wait();
      ASSERT_EQ(buffers[at], bytes_of<int32_t>({3 * i + 3}));
    }
  });
}

// Ranks may wait in different orders for calls of different groups, as the
// other back ends allow, though a contribution may have to wait for a peer.
class WaitsInTwoGroups : public testing::Test {
 protected:
  using Start =
      std::function<std::vector<std::unique_ptr<Work>>(Communicator&)>;

  /// Rank 0 waits for the other group first, if for the works at all.
  static void expect_no_deadlock(const Start& start, bool rank_0_drops) {
    run_ranks(
        3,
        [&](Communicator& comm) {
          const auto other = comm.split(0, 0);
          for (int i = 0; i < 5; ++i) {
            auto works = start(comm);
            if (comm.rank() == 0) {
              if (rank_0_drops) {
                works.clear();
              }
              other->barrier("first");
            }
            for (const auto& work : works) {
              work->wait();
            }
            if (comm.rank() != 0) {
              other->barrier("first");
            }
          }
          comm.barrier("all are done");
        },
        seconds(10));
  }

  Bytes large_[3] = {Bytes(300'000), Bytes(300'000), Bytes(300'000)};
  Bytes more_[3][4];
};

TEST_F(WaitsInTwoGroups, MayDifferInOrderForAReductionInParts) {
  for (const bool drops : {false, true}) {
    expect_no_deadlock(
        [&](Communicator& comm) {
          std::vector<std::unique_ptr<Work>> works;
          auto& buffer = large_[comm.rank()];
          works.push_back(
              comm.all_reduce(buffer, DType::kFloat32, ReduceOp::kSum, "norm"));
          return works;
        },
        drops);
  }
}

TEST_F(WaitsInTwoGroups, MayDifferInOrderForCallsWithoutRoom) {
  for (const bool drops : {false, true}) {
    expect_no_deadlock(
        [&](Communicator& comm) {
          std::vector<std::unique_ptr<Work>> works;
          for (Bytes& buffer : more_[comm.rank()]) {
            buffer.resize(300'000);
            works.push_back(comm.all_gather(buffer, "all_gather"));
          }
          return works;
        },
        drops);
  }
}

// A sleeper looks around by itself ten times a second; a lost wake-up would
// show in the sum.
TEST(Sleepers, AreWokenAtOnce) {
  constexpr int kRounds = 60;
  const auto start = Clock::now();
  run_ranks(3, [](Communicator& comm) {
    const auto slices = comm.share_slices(std::vector<int64_t>{64});
    for (int i = 0; i < kRounds; ++i) {
      if (i % 3 == comm.rank()) { // the others are asleep by then
        std::this_thread::sleep_for(milliseconds(2));
      }
      slices->publish();
      slices->await_published("a");
      if ((i + 1) % 3 == comm.rank()) {
        std::this_thread::sleep_for(milliseconds(2));
      }
      comm.barrier("b");
      if ((i + 2) % 3 == comm.rank()) {
        std::this_thread::sleep_for(milliseconds(2));
        comm.signal_failure("c");
      } else {
        EXPECT_TRUE(contains(barrier_error(comm), "failed: c"));
      }
    }
  });
  EXPECT_LT(Clock::now() - start, milliseconds(kRounds * 3 * 100 / 2));
}

TEST(ManyFailures, OfOneRankReachTheOthersOneByOne) {
  constexpr int kFailures = 100; // the rank must wait for the others at times
  run_ranks(3, [](Communicator& comm) {
    const auto child = comm.split(0, 0);
    for (int i = 0; i < kFailures; ++i) {
      const std::string text = "step " + std::to_string(i);
      if (comm.rank() == 0) {
        Bytes buffer = bytes_of<int32_t>({1});
        start_sum(*child, buffer).reset();
        comm.signal_failure(text);
        continue;
      }
      if (i == 0) {
        std::this_thread::sleep_for(milliseconds(100));
      }
      // Its call counts; the next does not.
      Bytes buffer = bytes_of<int32_t>({1});
      start_sum(*child, buffer)->wait();
      ASSERT_EQ(buffer, bytes_of<int32_t>({3}));
      ASSERT_EQ(barrier_error(*child), "rank 0/3 failed: " + text);
      ASSERT_EQ(barrier_error(comm), "rank 0/3 failed: " + text);
    }
    EXPECT_EQ(comm.epoch(), uint64_t{kFailures});
    child->barrier("all are here");
    comm.barrier("all are here");
  });
}

// A call is compared with those of all ranks before its bytes are used,
// whenever they come.
TEST(DifferentCalls, AreNeverTakenForOneAnother) {
  run_ranks(2, [](Communicator& comm) {
    std::mt19937 own(static_cast<unsigned>(comm.rank()));
    for (int round = 0; round < 20'000; ++round) {
      for (auto i = own() % 200; i > 0; --i) {
        comm.epoch(); // takes a moment
      }
      Bytes buffer(comm.rank() == 0 ? 8 : 16);
      const std::string text =
          error_of([&] { comm.all_gather(buffer, "a")->wait(); });
      ASSERT_TRUE(contains(text, "ranks differ: ")) << round << ": " << text;
    }
  });
}

// After a wait that was too long nothing goes on.
TEST(TimeOut, AbortsAllRanksForGood) {
  const auto comms = make_ranks(3, milliseconds(200));
  const auto children = split_all(comms);
  const auto start = Clock::now();
  std::thread peer([&] { barrier_error(*children[1]); });
  const std::string text = error_of([&] { comms[0]->barrier("start"); });
  peer.join();
  EXPECT_GE(Clock::now() - start, milliseconds(200));
  EXPECT_LT(Clock::now() - start, kAtOnce);
  for (const auto* all : {&comms, &children}) {
    for (const Comm& each : *all) {
      const std::string reason = each->aborted();
      EXPECT_TRUE(contains(reason, "timed out after 200 ms; not arrived: rank"))
          << reason;
      for (int i = 0; i < 2; ++i) {
        const auto again = barrier_error(*each);
        EXPECT_TRUE(contains(again, "barrier of b: rank ")) << again;
        EXPECT_TRUE(contains(again, reason)) << again;
      }
      each->signal_failure("too late");
      EXPECT_TRUE(contains(barrier_error(*each), reason));
    }
  }
}

TEST(TimeOut, NamesTheLastCallOfTheMissingRank) {
  const auto comms = make_ranks(2, milliseconds(200));
  Bytes buffer(8);
  const auto early = comms[1]->all_gather(buffer, "all_gather of unit 'a'");
  Bytes mine(8);
  comms[0]->all_gather(mine, "all_gather of unit 'a'")->wait();
  const std::string text = error_of([&] { comms[0]->barrier("start"); });
  EXPECT_TRUE(contains(text, "barrier of start: rank 0/2 timed out")) << text;
  EXPECT_TRUE(contains(text, "not arrived: rank 1 (thread of pid ")) << text;
  EXPECT_TRUE(contains(text, "last call here: all_gather of unit 'a')"))
      << text;
}

TEST(TimeOut, NamesTheFirstOfManyRanks) {
  const auto comms = make_ranks(12, milliseconds(200));
  const std::string text = error_of([&] { comms[0]->barrier("start"); });
  EXPECT_TRUE(contains(text, "not arrived: ranks 1 (thread of pid ")) << text;
  EXPECT_TRUE(contains(text, ", 6 (thread of pid ")) << text;
  EXPECT_TRUE(contains(text, " and 5 more. Look for an error")) << text;
}

TEST(TimeOut, ThatIsEndlessNeverComes) {
  run_ranks(
      2,
      [](Communicator& comm) {
        if (comm.rank() == 0) {
          std::this_thread::sleep_for(milliseconds(350));
        }
        comm.barrier("start");
      },
      milliseconds::max());
}

// However long they have waited before: its text is what they need to know.
TEST(LeavingByAnException, GivesTheTextToThoseWhoHaveWaitedLong) {
  const auto world = make_ranks(2);
  auto children = split_all(world);
  std::thread peer([&] {
    std::this_thread::sleep_for(milliseconds(1300));
    try {
      const auto mine = std::move(children[1]);
      throw std::runtime_error("out of memory");
    } catch (const std::exception& error) {
      std::this_thread::sleep_for(milliseconds(100));
      world[1]->signal_failure(error.what());
    }
  });
  EXPECT_EQ(barrier_error(*children[0]), "rank 1/2 failed: out of memory");
  peer.join();
}

} // namespace
} // namespace fsdp::detail
