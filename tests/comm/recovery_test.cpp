#include "sample_data.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

namespace fsdp::detail {
namespace {

// In each round some ranks fail after a random number of calls, at a
// random moment; the others go on until they throw.
class Rounds {
 public:
  Rounds(Communicator& comm, uint64_t seed)
      : comm_(comm),
        plan_(seed),
        own_(seed + 1000 + static_cast<uint64_t>(comm.rank())) {}

  void run(int rounds) {
    for (int i = 0; i < rounds && !testing::Test::HasFailure(); ++i) {
      const uint64_t before = comm_.epoch();
      if (draw(4) == 0) {
        meet(i);
        continue;
      }
      fail(i);
      ASSERT_EQ(comm_.epoch(), before + 1) << "round " << i;
      ended_ = std::exchange(works_, {});
    }
    meet(rounds);
  }

 private:
  static constexpr int64_t kNever = 1000000;

  struct Started {
    int64_t call;
    std::unique_ptr<Work> work;
    std::unique_ptr<Bytes> buffer;
    Bytes expected;
  };

  uint64_t draw(uint64_t limit) { return plan_() % limit; }

  // Every rank makes the same calls, which must give the right results.
  void meet(int round) {
    const auto calls = static_cast<int64_t>(1 + draw(5));
    for (int64_t call = 0; call < calls; ++call) {
      start(round, call);
    }
    finish_all();
  }

  void fail(int round) {
    std::vector<int64_t> calls_before_failing;
    for (int r = 0; r < comm_.size(); ++r) {
      const bool fails = draw(2) == 0;
      const auto calls = static_cast<int64_t>(draw(6));
      calls_before_failing.push_back(fails ? calls : kNever);
    }
    const auto first = draw(static_cast<uint64_t>(comm_.size()));
    calls_before_failing[first] = static_cast<int64_t>(draw(3));
    const std::string text = error_of([&] {
      go_on(round, calls_before_failing[static_cast<size_t>(comm_.rank())]);
    });
    if (text != "failed here") {
      EXPECT_TRUE(contains(text, " failed: round " + std::to_string(round)))
          << "in round " << round << ": " << text;
      // All that every rank has called becomes complete.
      EXPECT_GE(
          current_call_,
          *std::min_element(
              calls_before_failing.begin(), calls_before_failing.end()));
    }
  }

  [[noreturn]] void go_on(int round, int64_t calls_before_failing) {
    for (int64_t call = 0;; ++call) {
      if (call == calls_before_failing) {
        if (own_() % 8 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        comm_.signal_failure("round " + std::to_string(round));
        throw CommunicationError("failed here");
      }
      start(round, call);
      if (own_() % 3 == 0) {
        finish_all();
      }
      if (own_() % 5 == 0) {
        std::this_thread::yield();
      }
    }
  }

  void start(int round, int64_t call) {
    current_call_ = call;
    const std::string what =
        "round " + std::to_string(round) + " call " + std::to_string(call);
    const auto seed = static_cast<uint64_t>(call * 17 + round);
    std::vector<Bytes> inputs;
    for (int r = 0; r < comm_.size(); ++r) {
      inputs.push_back(
          sample(DType::kInt64, 5, seed * 8 + static_cast<uint64_t>(r)));
    }
    auto buffer =
        std::make_unique<Bytes>(inputs[static_cast<size_t>(comm_.rank())]);
    auto work = comm_.all_reduce(*buffer, DType::kInt64, ReduceOp::kSum, what);
    works_.push_back(
        {call,
         std::move(work),
         std::move(buffer),
         reference_reduce(ReduceOp::kSum, DType::kInt64, inputs)});
  }

  void finish_all() {
    for (Started& started : works_) {
      current_call_ = started.call;
      started.work->wait();
      EXPECT_EQ(*started.buffer, started.expected);
    }
    works_.clear();
  }

  Communicator& comm_;
  std::mt19937_64 plan_;
  std::mt19937_64 own_;
  std::vector<Started> works_;
  int64_t current_call_ = 0;
  std::vector<Started> ended_; // of an epoch before; never waited for
};

class Recovery : public testing::TestWithParam<int> {};

TEST_P(Recovery, AllMeetAgainAfterEveryFailure) {
  run_ranks(GetParam(), [](Communicator& comm) {
    Rounds(comm, 11).run(affordable(300));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    Recovery,
    testing::Range(1, 6),
    testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::detail
