// Weights that stay whole from one optimizer step to the next.

#include "api/models.h"
#include "api/program.h"
#include "harness/forwarding_communicator.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <stdexcept>

namespace fsdp::testing {
namespace shard_optimizer {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

constexpr int64_t kUnits = 3; // two blocks and the root

const auto kOptions =
    Options().strategy(Strategy::kShardOptimizer).units(each<Block>());

ProgramSettings settings_with_blocks() {
  ProgramSettings settings;
  settings.strategies = {Strategy::kFullShard, Strategy::kShardOptimizer};
  settings.hybrid_strategies = {};
  settings.options.units(each<Block>());
  return settings;
}

Tensor loss_of(Net& net, int pass = 0) {
  const auto rows = rows_of_rank(net.world());
  return net(wave({kRows, 3}, 0.7 + pass).index_select(0, rows)).pow(2).mean();
}

void evaluate(Net& net) {
  const torch::NoGradGuard no_grad;
  net(wave({4, 3}));
}

/// How many gathers `body` makes, on ranks that share nothing; on all of them.
int64_t gathers_of(Net& net, const std::function<void()>& body) {
  const auto before = net.gathers();
  body();
  const auto mine = net.gathers() - before;
  for (const auto& other :
       net.world().communicator().exchange(std::to_string(mine), "gathers")) {
    EXPECT_EQ(other, std::to_string(mine));
  }
  return mine;
}

void on_nets(const std::function<void(Net&, torch::optim::Optimizer&)>& body) {
  for (const int size : {2, 3, 4}) {
    on_ranks(size, [&](const World& world) {
      Net net(seeded(make_network), gathering_world(world), kOptions);
      torch::optim::AdamW optimizer(net.parameters(), 1e-2);
      body(net, optimizer);
    });
  }
}

void expect_that_of(const NetworkImpl& plain, Net& net) {
  for (const auto& [name, value] : whole_values(net)) {
    EXPECT_TRUE(all_close(value, plain.named_parameters()[name], 1e-5, 1e-7))
        << name;
  }
}

TEST(ShardOptimizer, GathersEachUnitOncePerStepForManyPasses) {
  on_nets([](Net& net, torch::optim::Optimizer& optimizer) {
    for (int step = 0; step < 3; ++step) {
      const auto gathers = gathers_of(net, [&] {
        evaluate(net);
        {
          const auto no_sync = net.no_sync();
          for (int micro = 0; micro < 3; ++micro) {
            loss_of(net, micro).backward();
          }
        }
        loss_of(net, 3).backward();
      });
      // A no-grad pass before the first training pass does not count on the
      // weights staying as they are.
      EXPECT_EQ(gathers, step == 0 ? kUnits : 2 * kUnits);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST(ShardOptimizer, SeveralForwardsBeforeTheBackwardsGatherOnce) {
  on_nets([](Net& net, torch::optim::Optimizer& optimizer) {
    for (int step = 0; step < 2; ++step) {
      const auto gathers = gathers_of(net, [&] {
        auto sum = loss_of(net, 0) + loss_of(net, 1);
        sum = sum + loss_of(net, 2);
        sum.backward();
      });
      EXPECT_EQ(gathers, kUnits);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST(ShardOptimizer, EvaluationBetweenBackwardAndStepKeepsNothing) {
  on_nets([](Net& net, torch::optim::Optimizer& optimizer) {
    const auto plain = seeded(make_network);
    torch::optim::AdamW plain_optimizer(plain->parameters(), 1e-2);
    for (int step = 0; step < 3; ++step) {
      loss_of(net).backward();
      evaluate(net);
      optimizer.step();
      optimizer.zero_grad();
      plain->forward(wave({kRows, 3})).pow(2).mean().backward();
      plain_optimizer.step();
      plain_optimizer.zero_grad();
      const torch::NoGradGuard no_grad;
      const auto x = wave({4, 3});
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-5, 1e-7)) << step;
    }
  });
}

/// An optimizer by hand that passes over empty shards: ranks without a part of
/// a unit write nothing and are not told that others do.
void step_of_what_is_there(Net& net, double learning_rate) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net.parameters()) {
    if (parameter.numel() > 0 && learning_rate != 0.0) {
      parameter.sub_(parameter.grad(), learning_rate);
    }
  }
  net->zero_grad();
}

TEST(ShardOptimizer, RanksWithEmptyShardsNeedNotWrite) {
  for (const bool evaluates : {false, true}) {
    on_nets([&](Net& net, torch::optim::Optimizer&) {
      const auto plain = seeded(make_network);
      torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        loss_of(net).backward();
        if (evaluates) {
          evaluate(net);
        }
        step_of_what_is_there(net, 0.1);
        if (evaluates) {
          evaluate(net);
        }
        plain->forward(wave({kRows, 3})).pow(2).mean().backward();
        plain_optimizer.step();
        plain_optimizer.zero_grad();
      }
      const torch::NoGradGuard no_grad;
      const auto x = wave({4, 3});
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-5, 1e-7));
      expect_that_of(*plain, net);
    });
  }
}

TEST(ShardOptimizer, AStepThatIsSkippedOrDoesNothingIsNoTrouble) {
  on_nets([](Net& net, torch::optim::Optimizer&) {
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    for (int step = 0; step < 4; ++step) {
      loss_of(net).backward();
      if (step % 2 == 0) {
        step_of_what_is_there(net, 0.0);
      } // else the step is skipped and the gradients accumulate
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
    }
    expect_that_of(*plain, net);
  });
}

TEST(ShardOptimizer, WeightsStayWholeBetweenPassesAndReshardLetsThemGo) {
  on_nets([](Net& net, torch::optim::Optimizer&) {
    const auto whole = net.describe();
    int64_t bytes = 0;
    for (const auto& unit : whole.units) {
      bytes += unit.whole_bytes;
    }
    loss_of(net);
    EXPECT_EQ(net.memory().gathered_bytes, bytes);
    for (const auto& parameter : net.parameters()) {
      EXPECT_EQ(parameter.dim(), 1); // a shard all the same
    }
    net.reshard();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_EQ(gathers_of(net, [&] { loss_of(net); }), kUnits);
  });
}

TEST(ShardOptimizer, GradientsAreShards) {
  on_nets([](Net& net, torch::optim::Optimizer&) {
    loss_of(net).backward();
    for (const auto& parameter : net.parameters()) {
      EXPECT_EQ(parameter.grad().numel(), parameter.numel());
    }
    EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
  });
}

TEST(ShardOptimizer, MicroBatchesThatSynchroniseAndEvaluationAreTheSame) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(
            net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        const auto micro_batch = [&](int pass) {
          const auto x = log.mine(wave({kRows, 3}, 0.7 + pass));
          net(x).pow(2).mean().backward();
        };
        const auto show = [&] {
          const torch::NoGradGuard no_grad;
          log.value("evaluation", net(wave({4, 3})));
        };
        for (int step = 0; step < 4; ++step) {
          micro_batch(0);
          show();
          {
            const auto no_sync = net.no_sync();
            micro_batch(1);
            show();
          }
          log.value("with a graph", net(wave({4, 3})));
          micro_batch(2);
          show();
          log.gradients(net);
          optimizer.step();
          show();
          show();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings_with_blocks());
}

TEST(ShardOptimizer, EditsAndReplacementsBetweenPassesAreSeen) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        const auto show = [&] { log.value("output", net(wave({4, 3}))); };
        show();
        net->head->weight.set_data(wave({2, 5}));
        show();
        {
          const torch::NoGradGuard no_grad;
          net->norm->weight.mul_(0.5);
        }
        show();
        {
          const auto region = net.region();
          const torch::NoGradGuard no_grad;
          net->head->bias.fill_(0.25);
        }
        show();
        log.parameters(net);
      },
      settings_with_blocks());
}

TEST(ShardOptimizer, AFailedPassLeavesNoTrace) {
  on_nets([](Net& net, torch::optim::Optimizer&) {
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    for (int rank = 0; rank < net.world().size(); ++rank) {
      const auto error = error_of([&] {
        auto y = net(x);
        y.register_hook([&](const Tensor& gradient) {
          TORCH_CHECK(net.world().rank() != rank, "bad luck");
          return gradient;
        });
        y.pow(2).mean().backward();
      });
      EXPECT_TRUE(contains(error, "bad luck")) << error;
      plain->zero_grad();
      plain->forward(x).pow(2).mean().backward();
      net->zero_grad();
      net(x).pow(2).mean().backward();
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(all_close(
            gradient, plain->named_parameters()[name].grad(), 1e-5, 1e-7))
            << name;
      }
    }
  });
}

} // namespace shard_optimizer
} // namespace fsdp::testing
