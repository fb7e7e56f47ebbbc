#include "one_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

namespace fsdp::detail {
namespace {

constexpr auto kFloat = DType::kFloat32;

// Issuing never waits, so one thread can be all ranks.
class Mismatch : public testing::Test {
 protected:
  using Call = std::function<std::unique_ptr<Work>(Communicator&)>;

  // The text that all ranks throw when rank `odd` calls `second` and the others
  // `first`; checks that they then meet again.
  std::string error(const Call& first, const Call& second, int odd = 1) {
    std::vector<std::unique_ptr<Work>> works;
    for (const auto& comm : comms_) {
      works.push_back((comm->rank() == odd ? second : first)(*comm));
      if (comm->rank() >= odd) {
        break; // later calls of the epoch would throw
      }
    }
    std::vector<std::string> errors;
    for (const auto& comm : comms_) {
      const auto r = static_cast<size_t>(comm->rank());
      errors.push_back(error_of(
          [&] { r < works.size() ? works[r]->wait() : first(*comm)->wait(); }));
      EXPECT_EQ(errors[r], errors[0]);
      EXPECT_EQ(comm->epoch(), 1u);
    }
    works.clear();
    for (const auto& comm : comms_) {
      works.push_back(gather(*comm));
    }
    for (const auto& work : works) {
      EXPECT_EQ(error_of([&] { work->wait(); }), "no error");
    }
    return errors[0];
  }

  std::unique_ptr<Work> gather(Communicator& comm) {
    return comm.all_gather(whole_, "all_gather of unit 'a'");
  }

  Bytes whole_ = Bytes(64);
  Bytes double_ = Bytes(128);
  Bytes part_ = Bytes(32);
  std::vector<Comm> comms_ = make_ranks(4);
};

TEST_F(Mismatch, OfTheCollectiveNamesBothCalls) {
  const std::vector<int64_t> cuts = {0, 8, 16, 24, 32};
  const auto scatter = [&](Communicator& comm) {
    return comm.reduce_scatter(
        double_, part_, kFloat, cuts, "reduce_scatter of unit 'b'");
  };
  const auto all_gather = [&](Communicator& comm) { return gather(comm); };
  EXPECT_EQ(
      error(all_gather, scatter),
      "ranks differ: rank 1/4 calls reduce_scatter of unit 'b' (128 bytes), "
      "rank 0/4 calls all_gather of unit 'a' (64 bytes). All ranks must call "
      "the same collectives in the same order.");
}

TEST_F(Mismatch, OfTheLastRankIsSeenByAll) {
  const auto name = [&](const char* what) {
    return
        [&, what](Communicator& comm) { return comm.all_gather(whole_, what); };
  };
  const std::string text = error(name("unit 'a'"), name("unit 'b'"), 3);
  EXPECT_TRUE(contains(
      text,
      "rank 3/4 calls all_gather of unit 'b' (64 bytes), rank 0/4 calls "
      "all_gather of unit 'a' (64 bytes)"))
      << text;
}

TEST_F(Mismatch, TextIsTheSameWhoeverComesFirst) {
  const auto late = comms_[1]->all_gather(whole_, "unit 'b'");
  const auto first = comms_[0]->all_gather(whole_, "unit 'a'");
  const std::string text = error_of([&] { late->wait(); });
  EXPECT_TRUE(contains(text, "unit 'b' (64 bytes), rank 0/4 calls")) << text;
}

TEST_F(Mismatch, OfTheSizeNamesBothSizes) {
  const std::string text = error(
      [&](Communicator& comm) { return comm.all_gather(whole_, "a"); },
      [&](Communicator& comm) { return comm.all_gather(double_, "a"); });
  EXPECT_TRUE(contains(text, "(128 bytes)") && contains(text, "(64 bytes)"))
      << text;
}

TEST_F(Mismatch, OfTypeOperationRootOrCutsIsNamed) {
  const auto reduce = [&](DType dtype, ReduceOp op) {
    return [this, dtype, op](Communicator& comm) {
      return comm.all_reduce(whole_, dtype, op, "norm");
    };
  };
  const std::string text = error(
      reduce(kFloat, ReduceOp::kSum), reduce(DType::kInt32, ReduceOp::kMax));
  EXPECT_TRUE(contains(
      text,
      "rank 1/4 calls all_reduce 'norm' (64 bytes, int32, max), rank 0/4 calls "
      "all_reduce 'norm' (64 bytes, float32, sum)"))
      << text;
}

TEST_F(Mismatch, OfTheRootIsNamed) {
  const auto broadcast = [&](int root) {
    return [this, root](Communicator& comm) {
      return comm.broadcast(whole_, root, "seed");
    };
  };
  const std::string text = error(broadcast(0), broadcast(2));
  EXPECT_TRUE(contains(text, "'seed' (64 bytes, root 2)")) << text;
  EXPECT_TRUE(contains(text, "'seed' (64 bytes, root 0)")) << text;
}

TEST_F(Mismatch, OfTheCutsIsNamed) {
  const auto scatter = [&](int64_t second) {
    return [this, second](Communicator& comm) {
      const std::vector<int64_t> cuts = {0, 8, second, 24, 32};
      const auto r = static_cast<size_t>(comm.rank());
      const auto bytes = static_cast<size_t>(4 * (cuts[r + 1] - cuts[r]));
      return comm.reduce_scatter(
          double_, std::span(double_).first(bytes), kFloat, cuts, "a");
    };
  };
  const std::string text = error(scatter(16), scatter(17));
  EXPECT_TRUE(contains(text, "sum, cuts [0, 8, 17, 24, 32])")) << text;
  EXPECT_TRUE(contains(text, "sum, cuts [0, 8, 16, 24, 32])")) << text;
}

TEST(MismatchOfThreads, OfBlockingCallsEndsAll) {
  run_ranks(3, [](Communicator& comm) {
    const std::string text = error_of([&] {
      if (comm.rank() == 2) {
        comm.exchange("x", "names");
      } else {
        comm.barrier("start");
      }
    });
    EXPECT_TRUE(contains(text, "rank 2/3 calls exchange of names")) << text;
    EXPECT_TRUE(contains(text, "/3 calls barrier of start")) << text;
    EXPECT_EQ(comm.epoch(), 1u);
    comm.barrier("again");
  });
}

TEST(TimeOut, EndlessLimitsDoNotOverflow) {
  run_ranks(
      2,
      [](Communicator& comm) { comm.barrier("start"); },
      std::chrono::milliseconds::max());
}

TEST(Leaving, EndsTheWaitOfTheOthers) {
  auto comms = make_ranks(3, std::chrono::seconds(60));
  comms[0]->signal_failure("before");
  EXPECT_TRUE(contains(error_of([&] { comms[2]->barrier("a"); }), "before"));
  comms[0].reset();
  Bytes buffer(3);
  const auto work = comms[2]->all_gather(buffer, "all_gather of unit 'a'");
  EXPECT_TRUE(work->ready());
  const std::string text = error_of([&] { work->wait(); });
  EXPECT_EQ(
      text,
      "all_gather of unit 'a': rank 2/3 waits for rank 0, gone without this "
      "call. Look for the first error there.");
  EXPECT_TRUE(contains(error_of([&] { comms[1]->barrier("a"); }), "before"));
  EXPECT_TRUE(contains(error_of([&] { comms[1]->barrier("a"); }), text));
  EXPECT_EQ(comms[1]->epoch(), 2u);
}

TEST(Leaving, KeepsWhatWasContributed) {
  auto comms = make_ranks(2, std::chrono::seconds(60));
  Bytes first = bytes_of<int32_t>({1, 0});
  comms[0]->all_gather(first, "a");
  comms[0].reset();
  Bytes second = bytes_of<int32_t>({0, 2});
  comms[1]->all_gather(second, "a")->wait();
  EXPECT_EQ(second, bytes_of<int32_t>({1, 2}));
}

} // namespace
} // namespace fsdp::detail
