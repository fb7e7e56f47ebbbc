// Shards inside of groups of ranks, replicas over the groups.

#include "api/models.h"
#include "api/program.h"
#include "runtime/checkpoint_function.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>
#include <stdexcept>

namespace fsdp::testing {
namespace hybrid {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

const std::vector<Strategy> kHybrid = {
    Strategy::kHybridShard,
    Strategy::kHybridShardGradOp};

/// In groups of every size that divides the world.
ProgramSettings only_hybrid(const std::vector<int>& world_sizes = {1, 2, 3, 4}) {
  ProgramSettings settings;
  settings.world_sizes = world_sizes;
  settings.strategies = {};
  settings.hybrid_strategies = kHybrid;
  settings.shard_sizes = all_shard_sizes;
  settings.options.units(each<Block>());
  return settings;
}

Options options_of(Strategy strategy, int64_t shard_size) {
  return Options().strategy(strategy).shard_size(shard_size);
}

/// On the ranks of each world, with each strategy and group size.
void on_groups(
    const std::vector<int>& world_sizes,
    const std::function<void(const World&, const Options&)>& body) {
  for (const int size : world_sizes) {
    for (const auto shard_size : all_shard_sizes(size)) {
      for (const auto strategy : kHybrid) {
        SCOPED_TRACE(
            "shard size " + std::to_string(shard_size) + " of " +
            std::to_string(size));
        on_ranks(size, [&](const World& world) {
          body(world, options_of(strategy, shard_size));
        });
        if (::testing::Test::HasFailure()) {
          return;
        }
      }
    }
  }
}

/// All ranks at one position of the groups hold the same bits, and gradients.
void expect_equal_replicas(ShardedModule& net, int64_t shard_size) {
  for (const auto& [name, tensor] : net.named_parameters()) {
    for (const auto& each : {tensor, tensor.grad()}) {
      std::string bytes;
      if (each.defined()) {
        const auto flat = each.detach().contiguous();
        bytes.assign(
            static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
      }
      const auto all = net.world().communicator().exchange(bytes, "replicas");
      for (size_t rank = 0; rank < all.size(); ++rank) {
        const auto position = rank % static_cast<size_t>(shard_size);
        EXPECT_EQ(all[rank], all[position]) << name << ", rank " << rank;
      }
    }
  }
}

template <class N>
void train(N& net, Log& log, torch::optim::Optimizer& optimizer) {
  for (int step = 0; step < 4; ++step) {
    auto loss = net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
    loss.backward();
    log.loss(loss);
    log.gradients(net);
    optimizer.step();
    optimizer.zero_grad();
  }
  log.parameters(net);
}

TEST(Hybrid, TrainingWithMomentumIsThatOfTheModelOnOneRank) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(
            net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        train(net, log, optimizer);
      },
      only_hybrid());
}

TEST(Hybrid, TrainingWithAdamWIsThatOfTheModelOnOneRank) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::AdamW optimizer(
            net.parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-4));
        train(net, log, optimizer);
      },
      only_hybrid());
}

TEST(Hybrid, AGroupOfAllRanksGivesTheBitsOfFullShard) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const World& world) {
      const auto values_with = [&](Strategy strategy) {
        Net net(
            seeded(make_network),
            world,
            options_of(strategy, world.size()).units(each<Block>()));
        Log log(world);
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        train(net, log, optimizer);
        return log.values();
      };
      expect_same_bits(
          values_with(Strategy::kFullShard),
          values_with(Strategy::kHybridShard));
    });
  }
}

TEST(Hybrid, ReplicasStayEqualInBits) {
  on_groups({2, 4}, [](const World& world, Options options) {
    Net net(seeded(make_network), world, options.units(each<Block>()));
    torch::optim::AdamW optimizer(net.parameters(), 1e-2);
    const auto rows = rows_of_rank(world);
    for (int step = 0; step < 5; ++step) {
      const auto x = wave({kRows, 3}, 0.7 + step).index_select(0, rows);
      net(x).pow(2).mean().backward();
      net.clip_grad_norm_(0.1);
      expect_equal_replicas(net, *options.shard_size());
      optimizer.step();
      optimizer.zero_grad();
      expect_equal_replicas(net, *options.shard_size());
      EXPECT_NO_THROW(net.check_replicas());
    }
  });
}

// Gradients.

auto make_linear() {
  return std::make_shared<nn::LinearImpl>(5, 3);
}

/// A loss whose gradient is `value` for every element of every parameter.
Tensor constant_loss(nn::LinearImpl& linear, double value) {
  return value * (linear.weight.sum() + linear.bias.sum());
}

void expect_gradients(ShardedModule& net, std::optional<double> value) {
  for (const auto& [name, gradient] : whole_gradients(net)) {
    ASSERT_EQ(gradient.defined(), value.has_value()) << name;
    if (value.has_value()) {
      EXPECT_TRUE(
          all_close(gradient, torch::full_like(gradient, *value), 1e-6, 0))
          << name << gradient;
    }
  }
}

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

/// 's': a micro-batch that synchronises, 'n': one that does not.
void expect_nothing_lost(const std::string& sequence) {
  SCOPED_TRACE(sequence);
  on_groups({2, 4}, [&](const World& world, const Options& options) {
    FullyShardedDataParallel net(seeded(make_linear), world, options);
    double sum = 0;
    std::optional<double> visible;
    for (size_t i = 0; i < sequence.size(); ++i) {
      std::optional<NoSync> no_sync;
      if (sequence[i] == 'n') {
        no_sync.emplace(net.no_sync());
      }
      const double value = 1 << i;
      net.call(constant_loss, value * (world.rank() + 1)).backward();
      sum += value * (world.size() + 1) / 2; // the mean over ranks
      if (sequence[i] == 's') {
        visible = sum;
      }
      expect_gradients(net, visible);
    }
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
  settings.options.units(
      when([](const std::string& name,
              const nn::Module& module) -> std::optional<UnitOptions> {
        if (dynamic_cast<const BlockImpl*>(&module) == nullptr) {
          return std::nullopt;
        }
        return UnitOptions().strategy(
            static_cast<Strategy>(name.back() - '0'));
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

// Whole weights.

TEST(Hybrid, WholeParametersAreWrittenBackToAllReplicas) {
  on_groups({2, 4}, [](const World& world, Options options) {
    Net net(seeded(make_network), world, options.units(each<Block>()));
    const auto plain = seeded(make_network);
    const auto edit = [](NetworkImpl& module) {
      const torch::NoGradGuard no_grad;
      module.head->weight.copy_(wave({2, 5}));
      module.layers[1]->as<BlockImpl>()->up->weight.select(0, 7).fill_(1);
    };
    {
      const auto whole = net.whole_parameters({.write_back = true});
      edit(*net.operator->());
    }
    edit(*plain);
    expect_equal_replicas(net, *options.shard_size());
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(at::equal(value, plain->named_parameters()[name])) << name;
    }
    const torch::NoGradGuard no_grad;
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(Hybrid, UnshardKeepsWholeWeightsUntilReshard) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          if constexpr (requires { net.unshard(); }) {
            step % 2 == 0 ? net.unshard() : net.reshard();
          }
          net(log.mine(wave({kRows, 3}))).pow(2).mean().backward();
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
          log.value("after", net(wave({4, 3})));
        }
        log.parameters(net);
      },
      only_hybrid());
}

TEST(Hybrid, ARankHoldsItsShareOfAGroup) {
  on_groups({4}, [](const World& world, const Options& options) {
    const FullyShardedDataParallel net(
        seeded([] { return std::make_shared<nn::LinearImpl>(64, 64); }),
        world,
        options);
    const auto bytes = 64 * 65 * 4;
    EXPECT_NEAR(
        net.memory().shard_bytes, bytes / *options.shard_size(), 2 * 64 * 4);
    EXPECT_EQ(net.describe().units[0].strategy, options.strategy());
  });
}

// Failures.

struct Breakable : NetworkImpl {
  std::string place; // where this rank fails
  Tensor forward(const Tensor& x) {
    auto y = layers[0]->as<BlockImpl>()->forward(input(x));
    if (place == "forward") {
      throw std::runtime_error("bad luck in forward");
    }
    if (place == "backward") {
      y.register_hook([](const Tensor& gradient) {
        TORCH_CHECK(false, "bad luck in backward");
        return gradient;
      });
    }
    return head(norm(layers[1]->as<BlockImpl>()->forward(y)));
  }
};

TEST(Hybrid, ARankThatFailsFailsTheStepOnAllAndTheNextOneWorks) {
  const auto make = [] { return std::make_shared<Breakable>(); };
  on_groups({2, 4}, [&](const World& world, Options options) {
    FullyShardedDataParallel net(
        seeded(make), world, options.units(each<Block>()));
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    const auto plain = seeded(make);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    const auto x = wave({4, 3});
    const auto step = [&](auto& model, torch::optim::Optimizer& update) {
      model.forward(x).pow(2).mean().backward();
      update.step();
      update.zero_grad();
    };
    for (const auto* place : {"forward", "backward", "forward"}) {
      for (int rank = 0; rank < world.size(); ++rank) {
        net->place = world.rank() == rank ? place : "";
        const auto error =
            error_of([&] { net(x).pow(2).mean().backward(); });
        EXPECT_TRUE(contains(error, std::string("bad luck in ") + place))
            << error;
        net->place = "";
        net(x).pow(2).mean().backward();
        optimizer.step();
        optimizer.zero_grad();
        step(*plain, plain_optimizer);
      }
    }
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(all_close(value, plain->named_parameters()[name], 1e-5, 1e-7))
          << name;
    }
    expect_equal_replicas(net, *options.shard_size());
  });
}

TEST(Hybrid, ReplicasThatDriftedAreNamed) {
  std::vector<std::string> errors(4);
  on_ranks(4, [&](const World& world) {
    auto options = options_of(Strategy::kHybridShard, 2);
    Net net(seeded(make_network), world, options.units(each<Block>()));
    EXPECT_NO_THROW(net.check_replicas());
    if (world.rank() == 3) {
      const torch::NoGradGuard no_grad;
      net->layers[0]->as<BlockImpl>()->down->weight.add_(1e-3);
    }
    errors[static_cast<size_t>(world.rank())] =
        error_of([&] { net.check_replicas(); });
  });
  share_results(errors);
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "'layers.0.down.weight'")) << error;
    EXPECT_TRUE(contains(error, "rank 1/4")) << error;
    EXPECT_TRUE(contains(error, "rank 3/4")) << error;
  }
}

TEST(Hybrid, AShardSizeThatDoesNotDivideIsRefused) {
  for (const std::optional<int64_t> size :
       {std::optional<int64_t>(), {0}, {-2}, {3}, {8}}) {
    on_ranks(4, [&](const World& world) {
      for (const auto& options :
           {Options().strategy(Strategy::kHybridShard).shard_size(size),
            Options()
                .units(named(
                    "head",
                    UnitOptions().strategy(Strategy::kHybridShardGradOp)))
                .shard_size(size)}) {
        const auto error =
            error_of([&] { Net(seeded(make_network), world, options); });
        EXPECT_TRUE(contains(error, "Options::shard_size")) << error;
        EXPECT_TRUE(contains(error, "world size 4")) << error;
        EXPECT_TRUE(
            contains(error, size ? std::to_string(*size) : "not set"))
            << error;
      }
    });
  }
}

TEST(Hybrid, RanksWithAnotherShardSizeAreTold) {
  on_ranks(4, [&](const World& world) {
    const auto options =
        options_of(Strategy::kHybridShard, world.rank() == 2 ? 1 : 2);
    const auto error =
        error_of([&] { Net(seeded(make_network), world, options); });
    EXPECT_TRUE(contains(error, "shard_size 1")) << error;
    EXPECT_TRUE(contains(error, "rank 2/4")) << error;
  });
}

} // namespace hybrid
} // namespace fsdp::testing
