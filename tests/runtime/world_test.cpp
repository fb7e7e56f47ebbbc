// What the peers of a rank see when its main function ends by an exception.

#include "harness/parity.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

namespace fsdp::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Net = FullyShardedDataParallel<torch::nn::LinearImpl>;

constexpr auto kLimit = std::chrono::seconds(12);
constexpr auto kAtOnce = std::chrono::seconds(6);

Net make_linear(const World& world) {
  std::shared_ptr<torch::nn::LinearImpl> module;
  build([&] {
    module = std::make_shared<torch::nn::LinearImpl>(5, 3);
    return TestModel{};
  });
  return Net(module, world);
}

void step(Net& net) {
  net(torch::ones({2, 5})).sum().backward();
}

/// The errors of `steps` steps; none may take long.
std::vector<std::string> errors_of_steps(Net& net, int steps) {
  const auto begin = Clock::now();
  std::vector<std::string> texts;
  for (int i = 0; i < steps; ++i) {
    texts.push_back(error_of([&] { step(net); }));
  }
  EXPECT_LT(Clock::now() - begin, kAtOnce);
  return texts;
}

void expect_gone(const std::string& text) {
  EXPECT_NE(text.find("rank 0/2"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1, gone without this call"), std::string::npos)
      << text;
}

TEST(RunAsThreads, AnExceptionBetweenStepsReachesAPeerInItsStep) {
  std::vector<std::string> texts;
  const auto thrown = error_of([&] {
    run_as_threads(
        2,
        [&](const World& world) {
          auto net = make_linear(world);
          step(net);
          if (world.rank() == 1) {
            throw std::runtime_error("the disk is full");
          }
          texts = errors_of_steps(net, 3);
        },
        kLimit);
  });
  EXPECT_EQ(thrown, "the disk is full");
  ASSERT_EQ(texts.size(), 3u);
  EXPECT_EQ(texts[0], "rank 1/2 failed: the disk is full");
  expect_gone(texts[1]);
  expect_gone(texts[2]);
}

TEST(RunAsThreads, ARankIsGoneEvenIfItsNetIsKept) {
  std::optional<Net> kept;
  std::vector<std::string> texts;
  const auto thrown = error_of([&] {
    run_as_threads(
        2,
        [&](const World& world) {
          auto net = make_linear(world);
          step(net);
          if (world.rank() == 1) {
            kept = std::move(net);
            throw std::runtime_error("the disk is full");
          }
          texts = errors_of_steps(net, 3);
        },
        kLimit);
  });
  EXPECT_EQ(thrown, "the disk is full");
  ASSERT_EQ(texts.size(), 3u);
  EXPECT_EQ(texts[0], "rank 1/2 failed: the disk is full");
  expect_gone(texts[1]);
  expect_gone(texts[2]);
}

TEST(RunAsThreads, ARankThatReturnsEarlyIsGoneEvenIfItsNetIsKept) {
  std::optional<Net> kept;
  std::vector<std::string> texts;
  run_as_threads(
      2,
      [&](const World& world) {
        auto net = make_linear(world);
        step(net);
        if (world.rank() == 1) {
          kept = std::move(net);
        } else {
          texts = errors_of_steps(net, 2);
        }
      },
      kLimit);
  ASSERT_EQ(texts.size(), 2u);
  expect_gone(texts[0]);
  expect_gone(texts[1]);
}

TEST(RunAsThreads, AWorldThatWasSplitHearsOfAFailureToo) {
  std::vector<std::string> texts;
  const auto thrown = error_of([&] {
    run_as_threads(
        3,
        [&](const World& world) {
          auto net = make_linear(world.split(world.rank() == 0 ? 0 : 1));
          step(net);
          if (world.rank() == 2) {
            throw std::runtime_error("the disk is full");
          }
          if (world.rank() == 1) {
            texts = errors_of_steps(net, 1);
          } else {
            step(net); // alone in its half
          }
        },
        kLimit);
  });
  EXPECT_EQ(thrown, "the disk is full");
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_EQ(texts[0], "rank 2/3 failed: the disk is full");
}

struct SleepsAtTheEnd {
  ~SleepsAtTheEnd() {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
};

TEST(RunAsThreads, ThrowsTheCauseAlthoughAPeerEndsFirst) {
  const auto thrown = error_of([&] {
    run_as_threads(
        2,
        [&](const World& world) {
          auto net = make_linear(world);
          if (world.rank() == 0) {
            step(net);
            return;
          }
          const SleepsAtTheEnd unwinding;
          net.call([](auto&) { throw std::runtime_error("the disk is full"); });
        },
        kLimit);
  });
  EXPECT_EQ(thrown, "the disk is full");
}

TEST(RunAsThreads, ThrowsWhatAPeerReportsWhenThereIsNoOtherCause) {
  const auto thrown = error_of([&] {
    run_as_threads(
        2,
        [&](const World& world) {
          if (world.rank() == 0) {
            world.communicator().barrier("the end");
          }
        },
        std::chrono::milliseconds(200));
  });
  EXPECT_NE(thrown.find("barrier of the end"), std::string::npos) << thrown;
}

TEST(RunAsThreads, PeersGetTheTextOfATorchErrorWithoutItsStackTrace) {
  std::string text;
  EXPECT_THROW(
      run_as_threads(
          2,
          [&](const World& world) {
            if (world.rank() == 1) {
              TORCH_CHECK_VALUE(false, "no such file");
            }
            text = error_of([&] { world.communicator().barrier("b"); });
          },
          kLimit),
      c10::ValueError);
  EXPECT_EQ(text, "rank 1/2 failed: no such file");
}

} // namespace
} // namespace fsdp::testing
