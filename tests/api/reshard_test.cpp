// Weights that are sharded over fewer ranks between forward and backward.

#include "api/models.h"
#include "api/program.h"
#include "harness/forwarding_communicator.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

namespace fsdp::testing {
namespace reshard {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kDepth = 5;
constexpr int64_t kWidth = 16;
constexpr int64_t kLayer = kWidth * kWidth * 4; // bytes

/// Layers that can fail.
struct ChainImpl : nn::Module {
  ChainImpl() {
    for (int64_t i = 0; i < kDepth; ++i) {
      layers->push_back(
          nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
    }
  }
  Tensor forward(Tensor x) {
    for (int64_t i = 0; i < kDepth; ++i) {
      if (i == fails_at) {
        throw std::runtime_error("bad luck in forward");
      }
      x = torch::tanh(
          layers[static_cast<size_t>(i)]->as<nn::Linear>()->forward(x));
      if (i == fails_behind) {
        x.register_hook([](const Tensor& gradient) {
          TORCH_CHECK(false, "bad luck in backward");
          return gradient;
        });
      }
    }
    return x;
  }
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  int64_t fails_at = -1;
  int64_t fails_behind = -1;
};

using Net = FullyShardedDataParallel<ChainImpl>;

auto make_chain() {
  return std::make_shared<ChainImpl>();
}

UnitOptions to(int64_t ranks) {
  return UnitOptions().reshard_after_forward_to(ranks);
}

/// Notes how many ranks take part in each gather.
class GatherSizes final : public ForwardingCommunicator {
 public:
  using Sizes = std::vector<int>;

  explicit GatherSizes(World world)
      : ForwardingCommunicator(std::move(world)),
        sizes_(std::make_shared<Sizes>()) {}
  GatherSizes(std::shared_ptr<Communicator> inner, std::shared_ptr<Sizes> sizes)
      : ForwardingCommunicator(std::move(inner)),
        sizes_(std::move(sizes)) {}

  Sizes& sizes() { return *sizes_; }

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    sizes_->push_back(size());
    return inner().all_gather(buffer, std::move(what));
  }
  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<GatherSizes>(inner().split(color, key), sizes_);
  }

 private:
  std::shared_ptr<Sizes> sizes_;
};

ProgramSettings settings_to(int64_t ranks) {
  ProgramSettings settings;
  settings.world_sizes = {4};
  settings.strategies = {Strategy::kFullShard};
  settings.hybrid_strategies = {};
  settings.options.units(each<Block>(to(ranks)));
  return settings;
}

TEST(ReshardAfterForwardTo, TrainingIsTheSame) {
  for (const int64_t ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    expect_same_program(
        make_network,
        [](auto& net, Log& log) {
          torch::optim::AdamW optimizer(
              net.parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-4));
          for (int step = 0; step < 4; ++step) {
            auto loss =
                net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
            loss.backward();
            log.loss(loss);
            log.gradients(net);
            optimizer.step();
            optimizer.zero_grad();
            const torch::NoGradGuard no_grad;
            log.value("evaluation", net(wave({4, 3})));
          }
          log.parameters(net);
        },
        settings_to(ranks));
  }
}

TEST(ReshardAfterForwardTo, WorksInsideOfHybridGroups) {
  auto settings = settings_to(2);
  settings.strategies = {};
  settings.hybrid_strategies = {Strategy::kHybridShard};
  settings.shard_sizes = [](int) { return std::vector<int64_t>{2, 4}; };
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        for (int step = 0; step < 2; ++step) {
          net(log.mine(wave({kRows, 3}))).pow(2).mean().backward();
          log.gradients(net);
        }
      },
      settings);
}

TEST(ReshardAfterForwardTo, SeveralForwardsBeforeTheBackwards) {
  for (const int64_t ranks : {1, 2}) {
    expect_same_program(
        make_network,
        [](auto& net, Log& log) {
          for (int step = 0; step < 2; ++step) {
            auto first = net(log.mine(wave({kRows, 3}, 0.7))).pow(2).mean();
            auto second = net(log.mine(wave({kRows, 3}, 0.9))).pow(2).mean();
            {
              const torch::NoGradGuard no_grad;
              log.value("evaluation", net(wave({4, 3})));
            }
            first.backward({}, true);
            log.gradients(net);
            second.backward();
            first.backward(); // again: parts are gone by now
            log.gradients(net);
          }
        },
        settings_to(ranks));
  }
}

TEST(ReshardAfterForwardTo, WritesInARegionReachItsBackward) {
  for (const int64_t ranks : {1, 2}) {
    expect_same_program(
        make_network,
        [](auto& net, Log& log) {
          for (int step = 0; step < 3; ++step) {
            auto y = net.call([&](NetworkImpl& m) {
              auto out = m.forward(log.mine(wave({kRows, 3})));
              for (auto& layer : *m.layers) {
                auto* block = layer->template as<BlockImpl>();
                block->up->weight.data().mul_(0.5); // after its use
              }
              return out + m.forward(log.mine(wave({kRows, 3}, 0.9)));
            });
            y.pow(2).mean().backward();
            log.gradients(net);
            log.parameters(net);
          }
        },
        settings_to(ranks));
  }
}

TEST(ReshardAfterForwardTo, ARankHoldsItsPartBetweenForwardAndBackward) {
  for (const int64_t ranks : {1, 2, 4}) {
    on_ranks(4, [&](const World& world) {
      Net net(
          seeded(make_chain),
          gathering_world(world),
          Options().units(each<nn::Linear>(to(ranks))));
      for (int step = 0; step < 2; ++step) {
        auto loss = net(wave({2, kWidth})).sum();
        EXPECT_EQ(
            net.memory().gathered_bytes,
            ranks == 4 ? 0 : kDepth * kLayer / ranks);
        loss.backward();
        EXPECT_EQ(net.memory().gathered_bytes, 0);
        const torch::NoGradGuard no_grad;
        net(wave({2, kWidth}));
        EXPECT_EQ(net.memory().gathered_bytes, 0);
      }
    });
  }
}

TEST(ReshardAfterForwardTo, BackwardGathersInsideOfASmallGroup) {
  for (const int ranks : {1, 2, 4}) {
    on_ranks(4, [&](const World& world) {
      const auto notes = std::make_shared<GatherSizes>(world);
      Net net(
          seeded(make_chain),
          World(notes),
          Options().units(each<nn::Linear>(to(ranks))));
      for (int step = 0; step < 2; ++step) {
        notes->sizes().clear();
        auto loss = net(wave({2, kWidth}).requires_grad_()).sum();
        EXPECT_EQ(notes->sizes(), GatherSizes::Sizes(kDepth, 4));
        notes->sizes().clear();
        loss.backward();
        EXPECT_EQ(notes->sizes(), GatherSizes::Sizes(kDepth, ranks));
      }
    });
  }
}

TEST(ReshardAfterForwardTo, AsksForReshardingWhateverTheStrategyKeeps) {
  for (const auto strategy :
       {Strategy::kShardGradOp, Strategy::kShardOptimizer}) {
    on_ranks(4, [&](const World& world) {
      Net net(
          seeded(make_chain),
          gathering_world(world),
          Options().strategy(strategy).units(each<nn::Linear>(to(2))));
      net(wave({2, kWidth}));
      EXPECT_EQ(net.memory().gathered_bytes, kDepth * kLayer / 2);
    });
  }
}

/// Those of one step; leaves none.
void expect_gradients(Net& net) {
  const auto plain = seeded(make_chain);
  plain->forward(wave({2, kWidth})).sum().backward();
  for (const auto& [name, gradient] : whole_gradients(net)) {
    EXPECT_TRUE(
        all_close(gradient, plain->named_parameters()[name].grad(), 1e-6, 1e-8))
        << name;
  }
  net->zero_grad();
}

void expect_right_step(Net& net) {
  net(wave({2, kWidth})).sum().backward();
  expect_gradients(net);
}

/// Every rank in turn fails; all throw, and the step works when done again.
void expect_failures_are_over(
    const std::function<void(ChainImpl&)>& break_one,
    const std::string& text) {
  for (const int64_t ranks : {1, 2}) {
    on_ranks(4, [&](const World& world) {
      Net net(
          seeded(make_chain),
          gathering_world(world),
          Options().units(each<nn::Linear>(to(ranks))));
      for (int rank = 0; rank < world.size(); ++rank) {
        if (world.rank() == rank) {
          break_one(*net.operator->());
        }
        const auto error = error_of([&] {
          net(wave({2, kWidth})).sum().backward();
        });
        EXPECT_TRUE(contains(error, text)) << error;
        net->fails_at = -1;
        net->fails_behind = -1;
        expect_right_step(net);
      }
    });
  }
}

TEST(ReshardAfterForwardTo, AFailedForwardLeavesNoTrace) {
  expect_failures_are_over(
      [](ChainImpl& chain) { chain.fails_at = 3; }, "bad luck in forward");
}

TEST(ReshardAfterForwardTo, AFailedBackwardLeavesNoTrace) {
  expect_failures_are_over(
      [](ChainImpl& chain) { chain.fails_behind = 2; }, "bad luck in backward");
}

// Ranks fail at different places, and then differ in what is whole; the region
// goes on all the same.
TEST(ReshardAfterForwardTo, AFailedBackwardInsideOfARegionLeavesNoTrace) {
  for (const int64_t ranks : {1, 2, 4}) {
    for (const int64_t slots : {1, 2, 4}) {
      on_ranks(4, [&](const World& world) {
        Net net(
            seeded(make_chain),
            gathering_world(world),
            Options().units(each<nn::Linear>(to(ranks))).slots(slots));
        for (int rank = 0; rank < world.size(); ++rank) {
          auto region = net.region();
          net->fails_behind = world.rank() == rank ? 4 : -1; // before any other
          auto loss = net(wave({2, kWidth})).sum();
          const auto error = error_of([&] { loss.backward(); });
          EXPECT_TRUE(contains(error, "bad luck")) << error;
          net->fails_behind = -1;
          net(wave({2, kWidth})).sum().backward();
          EXPECT_NO_THROW(region.close());
          expect_gradients(net);
          expect_right_step(net);
        }
      });
    }
  }
}

void expect_refused(
    const World& world,
    const Options& options,
    const std::vector<std::string>& parts) {
  const auto error = error_of([&] { Net(seeded(make_chain), world, options); });
  for (const auto& part : parts) {
    EXPECT_TRUE(contains(error, part)) << error;
  }
}

TEST(ReshardAfterForwardTo, ANumberOfRanksThatDoesNotDivideIsRefused) {
  for (const int64_t ranks : {-1, 0, 3, 8}) {
    on_ranks(4, [&](const World& world) {
      expect_refused(
          world,
          Options().units(named("layers.2", to(ranks))),
          {"'layers.2'",
           "reshard_after_forward_to",
           "got " + std::to_string(ranks)});
    });
  }
  on_ranks(4, [](const World& world) { // of a group, not of all
    expect_refused(
        world,
        Options()
            .strategy(Strategy::kHybridShard)
            .shard_size(2)
            .units(named("layers.2", to(4))),
        {"share the unit, 2", "got 4"});
  });
}

TEST(ReshardAfterForwardTo, ContradictsWeightsThatStayWhole) {
  on_ranks(2, [](const World& world) {
    expect_refused(
        world,
        Options().units(named("layers.2", to(1).reshard_after_forward(false))),
        {"'layers.2'",
         "reshard_after_forward_to",
         "reshard_after_forward(false)"});
  });
}

} // namespace reshard
} // namespace fsdp::testing
