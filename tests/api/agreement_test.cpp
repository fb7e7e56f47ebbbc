// Ranks that differ are told the same thing, at once, and can start again.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>

namespace fsdp::testing {
namespace agreement {

namespace nn = torch::nn;
using at::Tensor;

using MakeNetwork = std::function<std::shared_ptr<NetworkImpl>(int rank)>;
using MakeOptions = std::function<Options(int rank)>;

/// Makes a net that should be refused on every rank of three with one text,
/// which holds all of `parts`; then a good one, with the same world.
void expect_refused(
    const MakeNetwork& network,
    const MakeOptions& options,
    const std::vector<std::string>& parts) {
  std::vector<std::string> errors(3);
  on_ranks(3, [&](const World& world) {
    EXPECT_THROW(
        ([&] {
          try {
            FullyShardedDataParallel net(
                seeded([&] { return network(world.rank()); }),
                world,
                options(world.rank()));
          } catch (const c10::Error& error) {
            errors[static_cast<size_t>(world.rank())] =
                error.what_without_backtrace();
            throw;
          }
        })(),
        c10::ValueError);
    FullyShardedDataParallel net(seeded(make_network), world);
    const auto x = wave({4, 3});
    const auto plain = seeded(make_network);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
    net(x).sum().backward();
    EXPECT_GT(net.clip_grad_norm_(1.0), 0.0);
  });
  share_results(errors);
  for (const auto& part : parts) {
    EXPECT_TRUE(contains(errors[0], part)) << part << " in: " << errors[0];
  }
  EXPECT_EQ(errors, std::vector<std::string>(3, errors[0]));
}

Options same_options(int /*rank*/) {
  return Options().units(each<Block>());
}

/// The network, changed on rank 2.
MakeNetwork changed(const std::function<void(NetworkImpl&)>& change) {
  return [change](int rank) {
    auto network = make_network();
    if (rank == 2) {
      const torch::NoGradGuard no_grad;
      change(*network);
    }
    return network;
  };
}

MakeNetwork same_network() {
  return changed([](NetworkImpl& /*network*/) {});
}

TEST(Agreement, ShapesThatDiffer) {
  expect_refused(
      [](int rank) {
        return std::make_shared<NetworkImpl>(2, rank == 2 ? 7 : 5);
      },
      same_options,
      {"'input.weight'", "[5, 3]", "[7, 3]", "rank 0/3", "rank 2/3"});
}

TEST(Agreement, TheFirstDifferenceIsNamed) {
  expect_refused(
      changed([](NetworkImpl& network) {
        network.head->weight.set_data(torch::zeros({4, 5}));
        network.layers[1]->as<BlockImpl>()->up->bias.set_data(
            torch::zeros({12}));
      }),
      same_options,
      // Units in order of registration: the root with the head comes first.
      {"'head.weight'", "[2, 5]", "[4, 5]"});
}

TEST(Agreement, NamesThatDiffer) {
  expect_refused(
      [](int rank) {
        auto network = make_network();
        network->register_module(
            rank == 2 ? "added" : "extra", nn::Linear(2, 2));
        return network;
      },
      same_options,
      {"'extra.weight'", "'added.weight'"});
}

TEST(Agreement, AParameterThatOneRankLacks) {
  expect_refused(
      [](int rank) { return std::make_shared<NetworkImpl>(rank == 2 ? 1 : 2); },
      same_options,
      {"unit 'layers.1'", "(nothing)", "rank 2/3"});
}

TEST(Agreement, TypesThatDiffer) {
  expect_refused(
      changed([](NetworkImpl& network) { network.head->to(torch::kDouble); }),
      same_options,
      {"'head.weight'", "Float", "Double"});
}

TEST(Agreement, FlagsThatDiffer) {
  expect_refused(
      changed([](NetworkImpl& network) {
        network.head->bias.requires_grad_(false);
      }),
      same_options,
      {"'head.bias'", "requires_grad"});
}

TEST(Agreement, TiesThatDiffer) {
  expect_refused(
      [](int rank) {
        auto network = make_network();
        auto extra = std::make_shared<nn::Module>();
        network->register_module("extra", extra);
        extra->register_parameter(
            "weight",
            rank == 2 ? network->head->weight
                      : network->head->weight.detach().clone());
        return network;
      },
      same_options,
      {"'head.weight'", "'extra.weight'"});
}

TEST(Agreement, ValuesThatDiffer) {
  expect_refused(
      changed([](NetworkImpl& network) {
        network.layers[0]->as<BlockImpl>()->down->weight[3][1] += 1e-6;
      }),
      same_options,
      {"'layers.0.down.weight'",
       "rank 0/3",
       "rank 2/3",
       "torch::manual_seed",
       "sync_module_states"});
}

TEST(Agreement, OtherSeedsPerRank) {
  std::vector<std::string> errors(3);
  on_ranks(3, [&](const World& world) {
    errors[static_cast<size_t>(world.rank())] = error_of([&] {
      FullyShardedDataParallel net(
          seeded(make_network, static_cast<uint64_t>(world.rank())), world);
    });
  });
  share_results(errors);
  EXPECT_TRUE(contains(errors[0], "'input.weight'")) << errors[0];
  EXPECT_EQ(errors, std::vector<std::string>(3, errors[0]));
}

/// Options with one difference, on rank 1.
void expect_options_refused(
    const std::function<Options(bool odd)>& options,
    const std::vector<std::string>& parts) {
  expect_refused(
      same_network(), [&](int rank) { return options(rank == 1); }, parts);
}

TEST(Agreement, StrategiesThatDiffer) {
  expect_options_refused(
      [](bool odd) {
        return Options().strategy(
            odd ? Strategy::kNoShard : Strategy::kFullShard);
      },
      {"strategy", "rank 1/3"});
}

TEST(Agreement, UnitsThatDiffer) {
  expect_options_refused(
      [](bool odd) {
        return odd ? Options().units(named("layers.1"))
                   : Options().units(each<Block>());
      },
      {"layers.0"});
}

TEST(Agreement, UnitOptionsThatDiffer) {
  expect_options_refused(
      [](bool odd) {
        return Options().units(
            each<Block>(UnitOptions().reshard_after_forward(odd)));
      },
      {"unit 'layers.0'", "strategy"});
}

TEST(Agreement, MixedPrecisionThatDiffers) {
  expect_options_refused(
      [](bool odd) {
        return Options().mixed_precision(
            {.param_dtype = odd ? torch::kHalf : torch::kBFloat16});
      },
      {"param_dtype", "BFloat16", "Half"});
  expect_options_refused(
      [](bool odd) {
        MixedPrecision policy;
        if (odd) {
          policy.reduce_dtype = torch::kBFloat16;
        }
        return Options().mixed_precision(policy);
      },
      {"reduce_dtype", "BFloat16", "unchanged"});
  expect_options_refused(
      [](bool odd) {
        return Options().mixed_precision(
            {.param_dtype = torch::kBFloat16, .cast_inputs = odd});
      },
      {"cast_inputs"});
}

TEST(Agreement, DivideFactorsThatDiffer) {
  expect_options_refused(
      [](bool odd) { return Options().gradient_divide_factor(odd ? 2 : 3); },
      {"gradient_divide_factor", "2", "3"});
}

TEST(Agreement, DivideFactorsThatDifferALittle) {
  expect_options_refused(
      [](bool odd) {
        return Options().gradient_divide_factor(odd ? 1e-8 : 2e-8);
      },
      {"gradient_divide_factor"});
}

TEST(Agreement, SlotsThatDiffer) {
  expect_options_refused(
      [](bool odd) { return Options().slots(odd ? 2 : 3); }, {"slots"});
}

TEST(Agreement, SynchronisingOnSomeRanksOnly) {
  expect_options_refused(
      [](bool odd) { return Options().sync_module_states(odd); },
      {"sync_module_states"});
}

TEST(Agreement, AnOptionOutOfRangeOnOneRankEndsAllRanks) {
  std::vector<std::string> errors(3);
  on_ranks(
      3,
      [&](const World& world) {
        errors[static_cast<size_t>(world.rank())] = error_of([&] {
          FullyShardedDataParallel net(
              seeded(make_network),
              world,
              Options().slots(world.rank() == 1 ? 0 : 2));
        });
      },
      std::chrono::seconds(3));
  share_results(errors);
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "slots")) << error;
  }
}

TEST(Agreement, AParameterThatOneRankCannotShardEndsAllRanks) {
  std::vector<std::string> errors(3);
  on_ranks(
      3,
      [&](const World& world) {
        auto module = seeded(make_network);
        if (world.rank() == 1) {
          module->forward(wave({4, 3})).sum().backward();
        }
        errors[static_cast<size_t>(world.rank())] =
            error_of([&] { FullyShardedDataParallel net(module, world); });
      },
      std::chrono::seconds(3));
  share_results(errors);
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "'input.weight'")) << error;
    EXPECT_TRUE(contains(error, "rank 1/3")) << error;
  }
}

// Synchronising.

TEST(Agreement, SyncModuleStatesTakesParametersAndBuffersOfRankZero) {
  const auto make = [](int rank) {
    auto network = make_network();
    network->register_module("batch", nn::BatchNorm1d(3));
    const torch::NoGradGuard no_grad;
    for (auto& buffer : network->buffers()) {
      buffer.fill_(rank + 1);
    }
    network->register_buffer("table", torch::arange(5).mul_(rank + 1).t());
    return network;
  };
  on_ranks(3, [&](const World& world) {
    const auto seed = static_cast<uint64_t>(world.rank() + 5);
    FullyShardedDataParallel net(
        seeded([&] { return make(world.rank()); }, seed),
        world,
        Options()
            .units(each<Block>())
            .ignore({"head"})
            .sync_module_states(true));
    const auto first = seeded([&] { return make(0); }, 5);
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(at::equal(value, first->named_parameters()[name])) << name;
    }
    EXPECT_TRUE(at::equal(net->head->weight, first->head->weight));
    ASSERT_EQ(net->named_buffers().size(), 4U);
    for (const auto& each : net->named_buffers()) {
      EXPECT_TRUE(at::equal(each.value(), first->named_buffers()[each.key()]))
          << each.key();
    }
    net.check_replicas();
  });
}

TEST(Agreement, SyncModuleStatesKeepsNonContiguousLayouts) {
  on_ranks(2, [](const World& world) {
    const auto make = [] {
      auto module = std::make_shared<nn::LinearImpl>(5, 3);
      const torch::NoGradGuard no_grad;
      module->weight.set_data(torch::randn({5, 3}).t());
      return module;
    };
    FullyShardedDataParallel net(
        seeded(make, static_cast<uint64_t>(world.rank() + 1)),
        world,
        Options().sync_module_states(true));
    const auto first = seeded(make, 1);
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(at::equal(value, first->named_parameters()[name])) << name;
    }
  });
}

} // namespace agreement
} // namespace fsdp::testing
