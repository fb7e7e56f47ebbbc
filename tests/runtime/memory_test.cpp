// What a rank holds at rest and while it trains, counted where memory is
// allocated.

#include "harness/counting_allocator.h"
#include "harness/forwarding_communicator.h"
#include "harness/parity.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <deque>

namespace fsdp::testing {
namespace memory {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kWidth = 64; // its square is a multiple of every alignment
constexpr int kLayers = 10;
constexpr int64_t kUnitBytes = kWidth * kWidth * 4;
constexpr int64_t kModelBytes = kLayers * kUnitBytes;
constexpr int64_t kBatch = 2;
constexpr int64_t kActivationBytes = kBatch * kWidth * 4;

struct StackImpl : nn::Module {
  std::vector<nn::Linear> layers;

  StackImpl() {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false))));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer->forward(x));
    }
    return x.pow(2).mean();
  }
};
TORCH_MODULE(Stack);

/// Runs `body` on each rank, with what the rank allocates booked on an account.
/// Weights are gathered by collectives: what ranks share is no tensor's memory.
void with_accounts(
    int world_size,
    const std::function<void(const World&, MemoryAccount&)>& body) {
  std::deque<MemoryAccount> accounts(world_size);
  run_ranks(
      world_size,
      [&](const World& world) {
        auto& account = accounts[world.rank()];
        const BookedOn booked(account);
        body(gathering_world(world), account);
      },
      std::chrono::seconds(20));
  for (const auto& account : accounts) {
    EXPECT_EQ(account.live_bytes, 0); // nothing leaks
  }
}

std::shared_ptr<StackImpl> make_stack() {
  torch::manual_seed(3);
  return std::make_shared<StackImpl>();
}

Options per_layer() {
  return Options().units(each<nn::Linear>()).sync_module_states(true);
}

class Memory : public ::testing::TestWithParam<int> {};

TEST_P(Memory, AtRestARankHoldsItsShareOfParametersGradientsAndState) {
  with_accounts(GetParam(), [](const World& world, MemoryAccount& account) {
    FullyShardedDataParallel net(make_stack(), world, per_layer());
    // Slices end at a multiple of 64 elements.
    constexpr int64_t kPadding = kLayers * 64 * 4;
    const int64_t share = net.memory().shard_bytes;
    EXPECT_LE(share, kModelBytes / world.size() + kPadding);
    EXPECT_EQ(account.live_bytes, share);
    const auto x = torch::ones({kBatch, kWidth});
    const auto input = account.live_bytes - share;
    torch::optim::AdamW optimizer(net.parameters(), 1e-3);
    net(x).backward();
    // A rank's gradients have no padding: its part may be shorter than a slice.
    EXPECT_LE(account.live_bytes, 2 * share + input);
    optimizer.step();
    constexpr int64_t kSmall = 64 * kLayers; // step counts
    EXPECT_LE(account.live_bytes, 4 * share + input + kSmall);
    EXPECT_GE(account.live_bytes, share + 3 * (share - 2 * kPadding) + input);
    optimizer.zero_grad();
    EXPECT_LE(account.live_bytes, 3 * share + input + kSmall);
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
  });
}

TEST_P(Memory, ForwardHoldsNoMoreThanTheSlots) {
  for (const int64_t slots : {1, 2, 3}) {
    with_accounts(GetParam(), [&](const World& world, MemoryAccount& account) {
      FullyShardedDataParallel net(
          make_stack(), world, per_layer().slots(slots));
      const auto x = torch::ones({kBatch, kWidth});
      const torch::NoGradGuard no_grad;
      const auto before = account.live_bytes.load();
      account.reset_peak();
      net(x);
      // On one rank a shard is the whole, and a gather copies nothing.
      const int64_t whole =
          world.size() == 1 ? 0 : slots * (kUnitBytes + 64 * 4 * 3);
      EXPECT_LE(account.peak_bytes - before, whole + 4 * kActivationBytes);
      EXPECT_EQ(net.memory().gathered_bytes, 0);
      if (world.size() > 1) {
        EXPECT_GE(net.memory().peak_gathered_bytes, slots * kUnitBytes);
      }
      EXPECT_EQ(net.gathers(), kLayers);
    });
  }
}

TEST_P(Memory, AStepHoldsSlotsAndFewUnreducedGradients) {
  with_accounts(GetParam(), [](const World& world, MemoryAccount& account) {
    FullyShardedDataParallel net(make_stack(), world, per_layer());
    torch::optim::AdamW optimizer(net.parameters(), 1e-3);
    const auto x = torch::ones({kBatch, kWidth});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto before = account.live_bytes.load();
      const int64_t share = net.memory().shard_bytes;
      account.reset_peak();
      net(x).backward();
      // Gradients at rest, two units whole, the gradient that autograd makes,
      // and the buffers of reductions under way.
      const int64_t units = world.size() == 1 ? 2 : 2 + 1 + 3;
      EXPECT_LE(
          account.peak_bytes - before,
          share + units * (kUnitBytes + 64 * 4 * 3) +
              3 * kLayers * kActivationBytes)
          << "step " << step;
      optimizer.step();
    }
  });
}

TEST_P(Memory, GradOpKeepsWeightsWholeFromForwardToBackwardOnly) {
  with_accounts(GetParam(), [](const World& world, MemoryAccount&) {
    FullyShardedDataParallel net(
        make_stack(), world, per_layer().strategy(Strategy::kShardGradOp));
    const auto x = torch::ones({kBatch, kWidth});
    const auto loss = net(x);
    const auto whole = world.size() == 1 ? 0 : kModelBytes;
    EXPECT_GE(net.memory().gathered_bytes, whole);
    loss.backward();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_EQ(net.gathers(), kLayers);
    {
      const torch::NoGradGuard no_grad;
      net(x);
    }
    EXPECT_EQ(net.memory().gathered_bytes, 0);
  });
}

TEST_P(Memory, FrozenParametersCostNoGradientMemory) {
  with_accounts(GetParam(), [](const World& world, MemoryAccount& account) {
    auto stack = make_stack();
    for (int i = 0; i + 1 < kLayers; ++i) {
      stack->layers[i]->weight.set_requires_grad(false);
    }
    FullyShardedDataParallel net(
        stack, world, Options().sync_module_states(true));
    const auto x = torch::ones({kBatch, kWidth});
    const auto before = account.live_bytes.load();
    auto loss = net(x);
    loss.backward();
    loss = Tensor();
    EXPECT_LE(
        account.live_bytes - before, kUnitBytes / world.size() + 64 * 4 + 64);
    EXPECT_TRUE(stack->layers.back()->weight.grad().defined());
    EXPECT_FALSE(stack->layers.front()->weight.grad().defined());
  });
}

TEST(MemoryOfOneRank, DividingGradientsNeedsNoCopy) {
  with_accounts(1, [](const World& world, MemoryAccount& account) {
    FullyShardedDataParallel net(
        make_stack(), world, per_layer().gradient_divide_factor(3.0));
    const auto x = torch::ones({kBatch, kWidth});
    net(x).backward(); // the expected arrivals are known from here on
    for (auto& parameter : net.parameters()) {
      parameter.mutable_grad().reset();
    }
    const auto before = account.live_bytes.load();
    account.reset_peak();
    net(x).backward();
    EXPECT_LE(
        account.peak_bytes - before,
        kModelBytes + kUnitBytes + 3 * kLayers * kActivationBytes);
  });
}

TEST_P(Memory, SharedWeightsAreNoTensorsOfARank) {
  FSDP_SKIP_IF(!weights_are_shared(), "there are none");
  run_ranks(GetParam(), [](const World& world) {
    MemoryAccount account;
    const BookedOn booked(account);
    FullyShardedDataParallel net(make_stack(), world, per_layer());
    const int64_t alone = world.size() == 1 ? kModelBytes : 0;
    EXPECT_EQ(account.live_bytes, alone);
    const auto x = torch::ones({kBatch, kWidth});
    for (int step = 0; step < 2; ++step) {
      account.reset_peak();
      auto loss = net(x);
      EXPECT_LE(account.peak_bytes, alone + 3 * kLayers * kActivationBytes);
      loss.backward();
      EXPECT_EQ(net.memory().peak_gathered_bytes, 0);
      for (auto& parameter : net.parameters()) {
        parameter.mutable_grad().reset();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Memory, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace memory
} // namespace fsdp::testing
