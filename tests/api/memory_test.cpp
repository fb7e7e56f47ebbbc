// Memory at rest and while computing; reports about it.

#include "api/models.h"
#include "api/program.h"
#include "harness/counting_allocator.h"
#include "harness/forwarding_communicator.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <deque>
#include <sstream>

namespace fsdp::testing {
namespace memory {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kFloatBytes = 4;

/// `depth` equal layers, nothing else.
auto make_chain(int64_t depth, int64_t width) {
  nn::Sequential chain;
  for (int64_t i = 0; i < depth; ++i) {
    chain->push_back(nn::Linear(nn::LinearOptions(width, width).bias(false)));
  }
  return chain.ptr();
}

const auto kEachLayer = Options().units(each<nn::Linear>());

TEST(Memory, AtRestIsAShareOfTheModel) {
  static constexpr int64_t kDepth = 10;
  static constexpr int64_t kWidth = 64;
  static constexpr int64_t kLayer = kWidth * kWidth * kFloatBytes;
  static constexpr int64_t kModel = kDepth * kLayer;
  std::array<MemoryAccount, 4> accounts;
  on_ranks(4, [&](const World& world) {
    const auto x = wave({2, kWidth});
    auto& account = accounts[static_cast<size_t>(world.rank())];
    const BookedOn booked(account);
    FullyShardedDataParallel net(
        seeded([] { return make_chain(kDepth, kWidth); }),
        gathering_world(world),
        kEachLayer);
    const int64_t shards = kModel / 4 + 1000;
    EXPECT_LE(account.live_bytes, shards);
    for (int step = 0; step < 3; ++step) {
      account.reset_peak();
      net(x).pow(2).mean().backward();
      EXPECT_LE(account.live_bytes, 2 * shards) << "with gradients";
      // Two slots, a gradient on its way, its buffer and one in flight.
      EXPECT_LE(account.peak_bytes, 2 * shards + 6 * kLayer) << step;
      net->zero_grad();
      EXPECT_LE(account.live_bytes, shards);
    }
  });
}

TEST(Memory, TheReportAddsUp) {
  static constexpr int64_t kWidth = 16;
  static constexpr int64_t kLayer = kWidth * kWidth * kFloatBytes;
  on_ranks(4, [&](const World& world) {
    FullyShardedDataParallel net(
        seeded([] { return make_chain(5, kWidth); }),
        gathering_world(world),
        kEachLayer);
    const auto rest = net.memory();
    EXPECT_EQ(rest.whole_model_bytes, 5 * kLayer);
    EXPECT_EQ(rest.shard_bytes, 5 * kLayer / 4);
    EXPECT_EQ(rest.gradient_bytes, 0);
    EXPECT_EQ(rest.unreduced_gradient_bytes, 0);
    EXPECT_EQ(rest.gathered_bytes, 0);
    EXPECT_EQ(rest.peak_gathered_bytes, 0);
    net(wave({2, kWidth})).sum().backward();
    EXPECT_EQ(net.memory().gradient_bytes, 5 * kLayer / 4);
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_EQ(net.memory().peak_gathered_bytes, 2 * kLayer);
    net.reset_peak_memory();
    EXPECT_EQ(net.memory().peak_gathered_bytes, 0);
    {
      const auto whole = net.whole_parameters();
      EXPECT_EQ(net.memory().gathered_bytes, 5 * kLayer);
    }
    EXPECT_EQ(net.memory().peak_gathered_bytes, 5 * kLayer);
    {
      const auto no_sync = net.no_sync();
      net(wave({2, kWidth})).sum().backward();
      EXPECT_EQ(net.memory().unreduced_gradient_bytes, 5 * kLayer);
    }
  });
}

TEST(Memory, SlotsBoundTheGatheredUnits) {
  static constexpr int64_t kWidth = 16;
  static constexpr int64_t kLayer = kWidth * kWidth * kFloatBytes;
  for (const int64_t slots : {1, 2, 3}) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded([] { return make_chain(5, kWidth); }),
          gathering_world(world),
          Options().units(each<nn::Linear>()).slots(slots));
      for (int step = 0; step < 2; ++step) {
        net(wave({2, kWidth})).sum().backward();
        EXPECT_EQ(net.memory().peak_gathered_bytes, slots * kLayer);
      }
    });
  }
}

TEST(Memory, StrategiesGatherOnceOrTwiceAStep) {
  static constexpr int64_t kWidth = 16;
  const auto gathers = [&](const Options& options) {
    std::vector<double> counts(2);
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded([] { return make_chain(5, kWidth); }), world, options);
      const auto step = [&] {
        net(wave({2, kWidth})).sum().backward();
        net->zero_grad();
      };
      step();
      const auto before = net.gathers();
      step();
      counts[static_cast<size_t>(world.rank())] =
          static_cast<double>(net.gathers() - before);
      EXPECT_EQ(net.memory().gathered_bytes, 0);
    });
    share_results(counts);
    EXPECT_EQ(counts[0], counts[1]);
    return counts[0];
  };
  auto options = kEachLayer;
  // Backward does not read the first layer's weight: its input needs no
  // gradient.
  EXPECT_EQ(gathers(options.strategy(Strategy::kFullShard)), 5 + 4);
  EXPECT_EQ(gathers(options.strategy(Strategy::kShardGradOp)), 5);
  EXPECT_EQ(gathers(options.strategy(Strategy::kNoShard)), 0);
  EXPECT_EQ(
      gathers(Options().units(
          named("0") | named("1") |
          each<nn::Linear>(UnitOptions().reshard_after_forward(false)))),
      5 + 1);
}

TEST(Memory, ShardGradOpKeepsWeightsFromForwardToBackward) {
  static constexpr int64_t kWidth = 16;
  static constexpr int64_t kLayer = kWidth * kWidth * kFloatBytes;
  on_ranks(2, [](const World& world) {
    auto options = kEachLayer;
    FullyShardedDataParallel net(
        seeded([] { return make_chain(5, kWidth); }),
        gathering_world(world),
        options.strategy(Strategy::kShardGradOp));
    auto loss = net(wave({2, kWidth})).sum();
    EXPECT_EQ(net.memory().gathered_bytes, 5 * kLayer);
    loss.backward();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    const torch::NoGradGuard no_grad;
    net(wave({2, kWidth}));
    EXPECT_EQ(net.memory().gathered_bytes, 0);
  });
}

/// A large frozen layer with a small adapter beside it.
struct AdaptedImpl : nn::Module {
  explicit AdaptedImpl(int64_t width)
      : frozen(register_module(
            "frozen",
            nn::Linear(nn::LinearOptions(width, width).bias(false)))),
        adapter(register_module(
            "adapter",
            nn::Linear(nn::LinearOptions(width, 4).bias(false)))) {
    frozen->weight.requires_grad_(false);
  }
  Tensor forward(const Tensor& x) {
    return torch::tanh(frozen(x)) + adapter(x).sum(1, true);
  }
  nn::Linear frozen, adapter;
};
TORCH_MODULE(Adapted);

TEST(Memory, FrozenWeightsCostNoGradientsAndAreReleasedInBackward) {
  static constexpr int64_t kWidth = 64;
  static constexpr int64_t kFrozen = kWidth * kWidth * kFloatBytes;
  static constexpr int64_t kAdapter = 4 * kWidth * kFloatBytes;
  on_ranks(2, [](const World& world) {
    const auto make = [] {
      nn::Sequential chain;
      for (int i = 0; i < 6; ++i) {
        chain->push_back(Adapted(kWidth));
      }
      return chain.ptr();
    };
    FullyShardedDataParallel net(
        seeded(make), gathering_world(world), Options().units(each<Adapted>()));
    for (int step = 0; step < 2; ++step) {
      auto x = wave({2, kWidth}).requires_grad_();
      MemoryReport last;
      const auto hidden = net.call([&](nn::SequentialImpl& chain) {
        const auto first = chain.children()[0]->as<AdaptedImpl>()->forward(x);
        first.register_hook(
            [&](const Tensor& /*gradient*/) { last = net.memory(); });
        auto y = first;
        for (int i = 1; i < 6; ++i) {
          y = chain.children()[static_cast<size_t>(i)]
                  ->as<AdaptedImpl>()
                  ->forward(y);
        }
        return y;
      });
      hidden.pow(2).mean().backward();
      EXPECT_LE(last.gathered_bytes, 2 * (kFrozen + kAdapter));
      EXPECT_LE(last.unreduced_gradient_bytes, 6 * kAdapter);
      EXPECT_EQ(net.memory().gradient_bytes, 6 * kAdapter / 2);
      net->zero_grad();
    }
  });
}

TEST(Memory, ADivisorIsAppliedInPlace) {
  static constexpr int64_t kWidth = 256;
  const auto peak_with = [&](double divisor) {
    FullyShardedDataParallel net(
        seeded([] { return make_chain(1, kWidth); }),
        World(),
        Options().gradient_divide_factor(divisor));
    const auto x = wave({2, kWidth});
    static std::deque<MemoryAccount> accounts;
    auto& account = accounts.emplace_back();
    {
      const BookedOn booked(account);
      net(x).sum().backward();
    }
    const auto plain = seeded([] { return make_chain(1, kWidth); });
    plain->forward(x).sum().backward();
    EXPECT_TRUE(all_close(
        net.parameters()[0].grad().view({kWidth, kWidth}) * divisor,
        plain->parameters()[0].grad(),
        1e-6,
        1e-8));
    return account.peak_bytes.load();
  };
  EXPECT_NEAR(peak_with(1.0), peak_with(3.0), 100);
}

// Descriptions.

TEST(Memory, TheDescriptionNamesUnitsAndParameters) {
  on_ranks(2, [](const World& world) {
    const auto make = [] {
      auto network = make_network();
      network->head->bias.requires_grad_(false);
      return network;
    };
    const FullyShardedDataParallel net(
        seeded(make),
        world,
        Options().units(
            named("layers.1", UnitOptions().strategy(Strategy::kNoShard)) |
            each<Block>()));
    const auto description = net.describe();
    EXPECT_EQ(description.rank, world.rank());
    EXPECT_EQ(description.world_size, 2);
    ASSERT_EQ(description.units.size(), 3U);
    const auto& block = description.units[1];
    EXPECT_EQ(block.name, "layers.0");
    EXPECT_EQ(block.strategy, Strategy::kFullShard);
    ASSERT_EQ(block.parameters.size(), 6U);
    EXPECT_EQ(
        block.parameters[2].names,
        std::vector<std::string>{"layers.0.up.weight"});
    EXPECT_EQ(block.parameters[2].sizes, (std::vector<int64_t>{11, 5}));
    EXPECT_EQ(block.parameters[2].dtype, torch::kFloat);
    EXPECT_TRUE(block.parameters[2].requires_grad);
    EXPECT_EQ(block.shard_bytes * 2, block.whole_bytes);
    const auto& replicated = description.units[2];
    EXPECT_EQ(replicated.strategy, Strategy::kNoShard);
    EXPECT_EQ(replicated.parameters[2].local_numel, 55);
    int64_t numel = 0;
    for (const auto& unit : description.units) {
      for (const auto& parameter : unit.parameters) {
        const auto all = c10::multiply_integers(parameter.sizes);
        if (unit.strategy == Strategy::kFullShard) {
          EXPECT_EQ(
              mean_over_ranks(
                  world, static_cast<double>(parameter.local_numel)) *
                  2,
              all);
        }
        numel += all;
        EXPECT_EQ(parameter.requires_grad, parameter.names[0] != "head.bias");
      }
    }
    EXPECT_EQ(numel, 314);
  });
}

TEST(Memory, DescriptionsAndReportsCanBePrinted) {
  on_ranks(2, [](const World& world) {
    const auto make = [] {
      auto network = make_network();
      network->head->bias.requires_grad_(false);
      return network;
    };
    FullyShardedDataParallel net(
        seeded(make), world, Options().units(each<Block>()));
    std::ostringstream description;
    description << net.describe();
    const auto text = description.str();
    EXPECT_TRUE(
        contains(text, "rank " + std::to_string(world.rank()) + "/2, 3 units"))
        << text;
    EXPECT_TRUE(contains(text, "unit 'layers.0' (full shard)")) << text;
    EXPECT_TRUE(contains(text, "layers.1.up.weight [11, 5] Float")) << text;
    EXPECT_TRUE(contains(text, "head.bias [2] Float, frozen")) << text;
    std::ostringstream memory;
    memory << net.memory();
    EXPECT_TRUE(contains(memory.str(), "of 1256 bytes")) << memory.str();
  });
}

} // namespace memory
} // namespace fsdp::testing
