// Gradients of groups of ranks, joined over the groups.

#include "api/hybrid.h"
#include "api/micro_batches.h"
#include "runtime/checkpoint_function.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <string>

namespace fsdp::testing {
namespace hybrid {

namespace nn = torch::nn;
using at::Tensor;

// A shard degree of 1 must not turn the reduction off.
TEST(Hybrid, GroupsOfOneRankAverageOverAllRanks) {
  for (const auto strategy : kHybrid) {
    on_ranks(4, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_linear), world, options_of(strategy, 1));
      net.call(constant_loss, world.rank() + 1.0).backward();
      for (const auto& parameter : net.parameters()) {
        EXPECT_EQ(parameter.dim(), 1); // a shard of one
        EXPECT_TRUE(at::equal(
            parameter.grad(), torch::full_like(parameter.grad(), 2.5)));
      }
      expect_gradients(net, 2.5);
    });
  }
}

void expect_nothing_lost(const std::string& sequence) {
  SCOPED_TRACE(sequence);
  on_groups({2, 4}, [&](const World& world, const Options& options) {
    expect_micro_batches_add_up(sequence, world, options);
  });
}

TEST(Hybrid, EveryOrderOfMicroBatchesGivesTheSum) {
  for (const auto* sequence : {"ss", "ns", "nns", "sns", "nsns", "nnsss"}) {
    expect_nothing_lost(sequence);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(Hybrid, ADivisorReplacesTheWholeDivisor) {
  for (const double divisor : {1.0, 0.5}) {
    on_groups({1, 2, 4}, [&](const World& world, Options options) {
      FullyShardedDataParallel net(
          seeded(make_linear), world, options.gradient_divide_factor(divisor));
      net.call(constant_loss, world.rank() + 1.0).backward();
      const double sum = world.size() * (world.size() + 1) / 2.0;
      expect_gradients(net, sum / divisor);
    });
  }
}

TEST(Hybrid, ClippingCountsReplicasOnce) {
  for (const double type : {1.0, 2.0, 3.0, HUGE_VAL}) {
    auto settings = only_hybrid();
    settings.same_bits = true; // the same shards in the same order
    expect_same_program(
        make_network,
        [&](auto& net, Log& log) {
          torch::optim::SGD optimizer(net.parameters(), 0.5);
          for (int step = 0; step < 2; ++step) {
            net(log.mine(wave({kRows, 3}))).pow(2).mean().backward();
            log.value("norm", net.clip_grad_norm_(1e-2, type));
            log.gradients(net);
            optimizer.step();
            optimizer.zero_grad();
          }
          log.parameters(net);
        },
        settings);
  }
}

struct Three : nn::Module {
  Three() {
    for (const auto* name : {"a", "b", "c"}) {
      register_module(name, nn::Linear(7, 3));
    }
  }
  Tensor forward(const Tensor& x, const std::string& used) {
    auto y = torch::zeros({1});
    for (const auto& child : named_children()) {
      if (contains(used, child.key())) {
        y = y + child.value()->as<nn::Linear>()->forward(x).sum();
      }
    }
    return y;
  }
};

TEST(Hybrid, ParametersThatOnlySomeRanksUseGetTheMeanOverAll) {
  on_groups({4}, [](const World& world, Options options) {
    for (const bool units : {false, true}) {
      if (units) {
        options.units(each<nn::Linear>());
      }
      FullyShardedDataParallel net(
          seeded([] { return std::make_shared<Three>(); }), world, options);
      // Of `b` only one rank of the second group knows; of `c` nobody. Gathers
      // of a unit are for all ranks of a group.
      const bool reads_b = !units || *options.shard_size() == 1;
      const std::string used = world.rank() == 3 && reads_b ? "ab" : "a";
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        net(torch::ones({1, 7}), used).backward();
        for (const auto& [name, gradient] : whole_gradients(net)) {
          const bool present = name[0] == 'a' || (name[0] == 'b' && reads_b);
          ASSERT_EQ(gradient.defined(), present) << name;
          if (present) {
            const double mean = name[0] == 'a' ? 1.0 : 0.25;
            EXPECT_TRUE(at::equal(gradient, torch::full_like(gradient, mean)))
                << name << gradient;
          }
        }
      }
    }
  });
}

TEST(Hybrid, AUnitWhoseGradientArrivesTwiceInOnePass) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        for (int step = 0; step < 3; ++step) {
          Checkpoint::Body body;
          net.call([&](NetworkImpl& m) {
               auto* block = m.layers[1]->template as<BlockImpl>();
               body = [block](const Tensor& y) { return block->forward(y); };
               auto y = m.input(log.mine(wave({kRows, 3})));
               y = Checkpoint::apply(block->forward(y), &body);
               y = m.layers[0]->template as<BlockImpl>()->forward(y);
               return m.head(m.norm(Checkpoint::apply(y, &body)));
             })
              .pow(2)
              .mean()
              .backward();
          log.gradients(net);
        }
      },
      only_hybrid({2, 4}));
}

TEST(Hybrid, UnitsOfAllStrategiesTogether) {
  auto settings = only_hybrid({2, 4});
  settings.hybrid_strategies = {Strategy::kHybridShard};
  settings.options.units(when(
      [](const std::string& name,
         const nn::Module& module) -> std::optional<UnitOptions> {
        if (dynamic_cast<const BlockImpl*>(&module) == nullptr) {
          return std::nullopt;
        }
        return UnitOptions().strategy(static_cast<Strategy>(name.back() - '0'));
      }));
  expect_same_program(
      [] { return std::make_shared<NetworkImpl>(6); },
      [](auto& net, Log& log) {
        torch::optim::AdamW optimizer(
            net.parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-4));
        for (int step = 0; step < 3; ++step) {
          {
            const auto no_sync = net.no_sync();
            net(log.mine(wave({kRows, 3}, 0.9))).pow(2).mean().backward();
          }
          net(log.mine(wave({kRows, 3}, 0.7))).pow(2).mean().backward();
          log.value("norm", net.clip_grad_norm_(0.1));
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
          const torch::NoGradGuard no_grad;
          log.value("evaluation", net(wave({4, 3})));
        }
        log.parameters(net);
      },
      settings);
}

} // namespace hybrid
} // namespace fsdp::testing
