// Worlds over a back end of the program.

#include "comm/gloo_backend.h"
#include "comm/sample_data.h"
#include "gloo_world.h"

#include <fsdp/c10d.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace fsdp::detail {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A back end that the library knows nothing of.
class OwnBackend : public c10d::Backend {
 public:
  OwnBackend(BackendPtr inner, std::atomic<int>* calls)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        calls_(calls) {}

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    ++*calls_;
    return inner_->_allgather_base(output, input, options);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    ++*calls_;
    return inner_->alltoall_base(
        output, input, output_sizes, input_sizes, options);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override {
    ++*calls_;
    return inner_->broadcast(tensors, options);
  }

  void abort() override { break_backend(*inner_); }

 private:
  BackendPtr inner_;
  std::atomic<int>* calls_;
};

class OwnBackends : public testing::Test {
 protected:
  using Body = std::function<void(const World&)>;

  BackendPtr make(const StorePtr& store, int rank, int size) {
    const auto factory = gloo_factory(kGlooLimit, GlooInterface::kLoopback);
    ++made_;
    return c10::make_intrusive<OwnBackend>(factory(store, rank, size), &calls_);
  }

  void on_ranks(int size, const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        EXPECT_EQ(error_of<std::exception>([&] { body(rank); }), "no error");
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  void with_factory(int size, const Body& body) {
    on_ranks(size, [&](int rank) {
      body(world_over(
          [this](const StorePtr& store, int r, int n) {
            return make(store, r, n);
          },
          store_,
          rank,
          size,
          {.timeout = kGlooLimit}));
    });
  }

  void with_one(int size, const Body& body, bool with_store = true) {
    on_ranks(size, [&](int rank) {
      const auto part =
          c10::make_intrusive<c10d::PrefixStore>("program", store_);
      body(world_over(
          make(part, rank, size),
          with_store ? store_ : StorePtr(),
          {.timeout =
               with_store ? kGlooLimit : std::chrono::milliseconds(500)}));
    });
  }

  /// Small ones, and large ones, which work on copies here.
  static void expect_collectives_work(Communicator& comm) {
    for (const int64_t numel : {0, 1, 5, 60'000}) {
      std::vector<Bytes> inputs;
      for (int r = 0; r < comm.size(); ++r) {
        inputs.push_back(
            sample(DType::kBFloat16, numel, static_cast<uint64_t>(r)));
      }
      Bytes buffer = inputs[static_cast<size_t>(comm.rank())];
      comm.all_reduce(buffer, DType::kBFloat16, ReduceOp::kSum, "a")->wait();
      EXPECT_EQ(
          buffer, reference_reduce(ReduceOp::kSum, DType::kBFloat16, inputs));
      buffer = inputs[static_cast<size_t>(comm.rank())];
      comm.broadcast(buffer, comm.size() - 1, "b")->wait();
      EXPECT_EQ(buffer, inputs.back());
    }
    EXPECT_EQ(comm.exchange(std::to_string(comm.rank()), "c")[0], "0");
  }

  StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> calls_ = 0;
  std::atomic<int> made_ = 0;
};

TEST_F(OwnBackends, CarryAWorldThatCanBeSplit) {
  with_factory(3, [](const World& world) {
    expect_collectives_work(world.communicator());
    EXPECT_EQ(world.local_size(), 3);
    const World part = world.split(world.rank() / 2);
    EXPECT_EQ(part.size(), world.rank() < 2 ? 2 : 1);
    expect_collectives_work(part.communicator());
  });
  EXPECT_EQ(made_, 3 + 2); // a rank alone needs none
  EXPECT_GT(calls_, 0);
}

TEST_F(OwnBackends, AreMadeAfreshAfterAFailure) {
  with_factory(2, [](const World& world) {
    auto& comm = world.communicator();
    if (world.rank() == 0) {
      comm.signal_failure("a");
    } else {
      EXPECT_EQ(error_of([&] { comm.barrier("b"); }), "rank 0/2 failed: a");
    }
    expect_collectives_work(comm);
  });
  EXPECT_EQ(made_, 4);
}

TEST_F(OwnBackends, CarrySeveralWorldsOverOneStore) {
  on_ranks(2, [&](int rank) {
    const auto factory = [this](const StorePtr& store, int r, int n) {
      return make(store, r, n);
    };
    const World first = world_over(factory, store_, rank, 2);
    const World second = world_over(factory, store_, rank, 2);
    expect_collectives_work(second.communicator());
    expect_collectives_work(first.communicator());
  });
}

TEST_F(OwnBackends, OneAloneCarriesSplitsOfAllRanks) {
  with_one(2, [](const World& world) {
    expect_collectives_work(world.communicator());
    const World first = world.split(0);
    const World second = world.split(0, world.rank());
    expect_collectives_work(first.communicator());
    expect_collectives_work(second.communicator());
    const auto text = error_of<std::exception>(
        [&] { world.split(world.rank() == 0 ? 0 : 1).barrier(); });
    EXPECT_EQ(text, "no error"); // worlds of one rank need no back end
  });
  EXPECT_EQ(made_, 2);
}

TEST_F(OwnBackends, OneAloneRefusesOtherSplits) {
  with_one(3, [](const World& world) {
    if (world.rank() < 2) {
      const auto text = error_of<std::exception>([&] { world.split(0); });
      EXPECT_TRUE(contains(text, "into all of its ranks in their order"))
          << text;
      EXPECT_TRUE(contains(text, "Give world_over a factory")) << text;
    } else {
      EXPECT_EQ(world.split(1).size(), 1);
    }
  });
}

TEST_F(OwnBackends, OneAloneTellsCommunicatorsApart) {
  with_one(2, [](const World& world) {
    const World first = world.split(0);
    const World second = world.split(0);
    const World& mine = world.rank() == 0 ? first : second;
    const auto text = error_of([&] { mine.communicator().barrier("step"); });
    EXPECT_TRUE(contains(text, "ranks differ: rank 1/2 calls")) << text;
    EXPECT_TRUE(contains(text, "barrier of step")) << text;
  });
}

TEST_F(OwnBackends, OneAloneEndsWithAFailure) {
  with_one(2, [](const World& world) {
    auto& comm = world.communicator();
    const std::string failure = "rank 0/2 failed: out of memory";
    if (world.rank() == 0) {
      comm.signal_failure("out of memory");
    } else {
      const auto text = error_of([&] { comm.barrier("b"); });
      EXPECT_TRUE(contains(text, failure)) << text;
    }
    for (int i = 0; i < 2; ++i) {
      const auto text = error_of([&] { comm.barrier("next"); });
      EXPECT_TRUE(contains(text, "aborted: " + failure)) << text;
      EXPECT_TRUE(contains(text, "a factory of back ends instead")) << text;
    }
  });
}

TEST_F(OwnBackends, OneWithoutAStoreCanNotSayWhoIsMissing) {
  with_one(
      2,
      [](const World& world) {
        auto& comm = world.communicator();
        expect_collectives_work(comm);
        if (world.rank() == 0) {
          const auto text = error_of([&] { comm.barrier("b"); });
          EXPECT_TRUE(
              contains(text, "not arrived: unknown, as there is no store"))
              << text;
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(800));
        }
      },
      false);
}

TEST_F(OwnBackends, ThatCanNotBeMadeAreAnErrorOfTheStart) {
  on_ranks(2, [&](int rank) {
    const auto factory = [](const StorePtr&, int, int) -> BackendPtr {
      throw std::runtime_error("no such device");
    };
    const auto text = error_of<c10::DistBackendError>(
        [&] { world_over(factory, store_, rank, 2, {.timeout = kGlooLimit}); });
    EXPECT_TRUE(contains(text, "no such device")) << text;
  });
}

TEST_F(OwnBackends, NeedRightArguments) {
  const auto error = [](auto&& call) {
    return error_of<c10::ValueError>(call);
  };
  const C10dBackendFactory factory = [](const StorePtr&, int, int) {
    return BackendPtr();
  };
  EXPECT_TRUE(contains(
      error([&] { world_over({}, store_, 0, 1); }), "the factory is empty"));
  EXPECT_TRUE(contains(
      error([&] { world_over(factory, StorePtr(), 0, 2); }), "store is null"));
  EXPECT_TRUE(contains(
      error([&] { world_over(factory, store_, 2, 2); }), "got rank 2 of 2"));
  EXPECT_TRUE(contains(
      error([&] {
        world_over(
            factory, store_, 0, 2, {.timeout = std::chrono::milliseconds(0)});
      }),
      "expected a positive time limit, but got 0 ms"));
  EXPECT_TRUE(contains(
      error([&] { world_over(BackendPtr(), store_); }), "back end is null"));
}

} // namespace
} // namespace fsdp::detail
