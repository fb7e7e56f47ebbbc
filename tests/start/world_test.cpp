#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr std::chrono::seconds kLimit(20);

std::string text_of_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(World, OfOneIsTheOnlyOneOfItsHost) {
  EXPECT_EQ(World().local_rank(), 0);
  EXPECT_EQ(World().local_size(), 1);
  World().barrier();
}

TEST(World, ThreadsAreOnOneHost) {
  run_as_threads(
      3,
      [](const World& world) {
        EXPECT_EQ(world.local_rank(), world.rank());
        EXPECT_EQ(world.local_size(), 3);
        const auto part = world.split(world.rank() == 0 ? 0 : 1);
        EXPECT_EQ(part.local_rank(), part.rank());
        EXPECT_EQ(part.local_size(), world.rank() == 0 ? 1 : 2);
      },
      kLimit);
}

TEST(World, ABarrierWaitsForAllRanks) {
  std::atomic<int> come{0};
  run_as_threads(
      2,
      [&](const World& world) {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(world.rank() * 100));
        ++come;
        world.barrier();
        EXPECT_EQ(come, 2);
      },
      kLimit);
}

TEST(World, CopiesAreShutDownTogether) {
  const World world;
  const auto copy = world;
  world.shutdown();
  EXPECT_TRUE(contains(
      text_of_error([&] { copy.barrier(); }), "the world was shut down"));
  copy.shutdown();
  EXPECT_EQ(copy.size(), 1);
  EXPECT_EQ(copy.rank(), 0);
  EXPECT_EQ(copy.local_size(), 1);
}

TEST(World, ShutdownThrowsWhatLibtorchThrows) {
  const World world;
  world.shutdown();
  EXPECT_THROW(world.communicator(), c10::DistBackendError);
  EXPECT_THROW(world.barrier(), c10::DistBackendError);
  EXPECT_THROW(world.split(0), c10::DistBackendError);
}

TEST(World, APartEndsWithTheWholeButNotTheOtherWayRound) {
  run_as_threads(
      2,
      [](const World& world) {
        const auto part = world.split(0);
        const auto part_of_part = part.split(0);
        part.shutdown();
        EXPECT_TRUE(contains(
            text_of_error([&] { part_of_part.barrier(); }), "shut down"));
        world.barrier();
        const auto other = world.split(0);
        world.shutdown();
        EXPECT_TRUE(
            contains(text_of_error([&] { other.barrier(); }), "shut down"));
        other.shutdown();
      },
      kLimit);
}

TEST(World, ShutdownThrowsWhenARankDoesNotComeAndEndsTheWorld) {
  std::string error;
  std::string later;
  run_as_threads(
      2,
      [&](const World& world) {
        if (world.rank() == 0) {
          error = text_of_error([&] { world.shutdown(); });
          later = text_of_error([&] { world.barrier(); });
        }
      },
      std::chrono::milliseconds(500));
  EXPECT_TRUE(contains(error, "shutdown of the world")) << error;
  EXPECT_TRUE(contains(error, "rank 1")) << error;
  EXPECT_TRUE(contains(later, "the world was shut down")) << later;
}

TEST(World, CommunicatorsOfTheEndedWorldThrowButKnowTheirPlace) {
  const World world;
  auto& communicator = world.communicator();
  const auto child = communicator.split(0, 0);
  child->signal_failure("x");
  world.shutdown();
  std::vector<std::byte> bytes(8);
  EXPECT_EQ(child->rank(), 0);
  EXPECT_EQ(child->size(), 1);
  EXPECT_EQ(child->epoch(), 1u);
  EXPECT_TRUE(contains(child->aborted(), "the world was shut down"));
  child->signal_failure("nobody hears it");
  for (const auto& error :
       {text_of_error([&] { child->barrier("b1"); }),
        text_of_error([&] { child->exchange("x", "b1"); }),
        text_of_error([&] { child->broadcast(bytes, 0, "b1"); }),
        text_of_error([&] { child->all_gather(bytes, "b1"); })}) {
    EXPECT_TRUE(contains(error, "rank 0/1: b1: the world was shut down"))
        << error;
  }
}

/// Calls of a net of `size` ranks whose world was shut down.
void expect_net_refuses(int size) {
  run_as_threads(
      size,
      [](const World& world) {
        FullyShardedDataParallel net(
            torch::nn::Linear(3, 2), world, Options().sync_module_states(true));
        auto loss = net(torch::ones({4, 3})).sum();
        loss.backward();
        world.shutdown();
        EXPECT_TRUE(net.parameters().front().grad().defined());
        for (const auto& call : std::vector<std::function<void()>>{
                 [&] {
                   net(torch::ones({4, 3}));
                 },
                 [&] { auto region = net.region(); },
                 [&] { auto scope = net.no_sync(); },
                 [&] { auto whole = net.whole_parameters(); },
                 [&] { net.unshard(); }}) {
          const auto error = text_of_error(call);
          EXPECT_TRUE(contains(error, "the world was shut down")) << error;
        }
      },
      kLimit);
}

TEST(World, ANetOfAnEndedWorldRefusesCalls) {
  expect_net_refuses(2);
}

TEST(World, ANetOfAnEndedWorldOfOneRefusesCalls) {
  expect_net_refuses(1);
}

} // namespace
} // namespace fsdp::testing
