// Making, moving and dissolving nets.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <type_traits>

namespace fsdp::testing {
namespace construct {

namespace nn = torch::nn;
using Net = FullyShardedDataParallel<NetworkImpl>;

template <class T>
concept Saveable = requires(T& net) {
  std::declval<torch::serialize::OutputArchive&>() << net;
};
static_assert(Saveable<Network>);
static_assert(!Saveable<Net>, "torch::save(net, file) must not compile");
static_assert(!Saveable<ShardedTensors>);

static_assert(!std::is_copy_constructible_v<Net>);
static_assert(!std::is_copy_assignable_v<Net>);
static_assert(std::is_nothrow_move_constructible_v<Net>);
static_assert(std::is_nothrow_move_assignable_v<Net>);
static_assert(!std::is_copy_constructible_v<Region>);
static_assert(!std::is_copy_constructible_v<NoSync>);
static_assert(!std::is_copy_constructible_v<WholeParameters>);
static_assert(
    !std::is_convertible_v<std::shared_ptr<NetworkImpl>, Net>,
    "sharding changes the module: it is never implicit");

at::Tensor expected_output() {
  return seeded(make_network)->forward(wave({4, 3}));
}

TEST(Construct, TakesASharedPointerAndDeducesTheType) {
  FullyShardedDataParallel net(seeded(make_network));
  static_assert(std::is_same_v<decltype(net), Net>);
  EXPECT_EQ(net.world().size(), 1);
  EXPECT_TRUE(all_close(net(wave({4, 3})), expected_output(), 1e-6, 1e-8));
}

TEST(Construct, TakesAModuleHolderAndSharesItsModule) {
  auto holder = seeded([] { return Network(); });
  FullyShardedDataParallel net(holder, World(), Options().units(each<Block>()));
  static_assert(std::is_same_v<decltype(net), Net>);
  EXPECT_EQ(net.operator->(), holder.get());
  EXPECT_EQ(net.module(), holder.ptr());
  EXPECT_TRUE(all_close(net(wave({4, 3})), expected_output(), 1e-6, 1e-8));
}

TEST(Construct, TakesATemporaryHolderOfTheLibrary) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel linear(
        seeded([] { return nn::Linear(3, 5); }), world);
    static_assert(std::is_same_v<
                  decltype(linear),
                  FullyShardedDataParallel<nn::LinearImpl>>);
    auto plain = seeded([] { return nn::Linear(3, 5); });
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(linear(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(Construct, RefusesANullModule) {
  const auto error = error_of(
      [] { FullyShardedDataParallel net(std::shared_ptr<NetworkImpl>{}); });
  EXPECT_TRUE(contains(error, "module to shard is null")) << error;
}

TEST(Construct, RefusesAnEmptyHolder) {
  Network empty(nullptr);
  const auto error = error_of([&] { FullyShardedDataParallel net(empty); });
  EXPECT_NE(error, "");
}

TEST(Construct, TheErrorOfAWrongArgumentIsAValueError) {
  EXPECT_THROW(
      FullyShardedDataParallel net(std::shared_ptr<NetworkImpl>{}),
      c10::ValueError);
}

TEST(Construct, KeepsTheModuleAndItsNames) {
  on_ranks(2, [](const World& world) {
    auto module = seeded(make_network);
    std::vector<std::string> before;
    for (const auto& each : module->named_parameters()) {
      before.push_back(each.key());
    }
    const FullyShardedDataParallel net(
        module, world, Options().units(each<Block>()));
    std::vector<std::string> after;
    for (const auto& each : net->named_parameters()) {
      after.push_back(each.key());
    }
    EXPECT_EQ(before, after);
    EXPECT_EQ(net.operator->(), module.get());
  });
}

TEST(Construct, RefusesAModuleThatIsShardedAlready) {
  on_ranks(2, [](const World& world) {
    auto module = seeded(make_network);
    FullyShardedDataParallel net(module, world, Options().units(each<Block>()));
    const auto error =
        error_of([&] { FullyShardedDataParallel again(module, world); });
    EXPECT_TRUE(contains(error, "'input.weight'")) << error;
    EXPECT_TRUE(contains(error, "sharded already")) << error;
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), expected_output(), 1e-6, 1e-8));
  });
}

TEST(Construct, RefusesAModuleWithAShardedPart) {
  on_ranks(2, [](const World& world) {
    auto module = seeded(make_network);
    FullyShardedDataParallel head(module->head, world);
    const auto error =
        error_of([&] { FullyShardedDataParallel net(module, world); });
    EXPECT_TRUE(contains(error, "'head.weight'")) << error;
    EXPECT_TRUE(contains(error, "sharded already")) << error;
  });
}

TEST(Construct, AModuleCanBeShardedAgainWhenItsNetIsGone) {
  on_ranks(2, [](const World& world) {
    auto module = seeded(make_network);
    {
      FullyShardedDataParallel first(module, world);
      module = unwrap(std::move(first));
    }
    FullyShardedDataParallel second(
        module, world, Options().units(each<Block>()));
    EXPECT_TRUE(all_close(second(wave({4, 3})), expected_output(), 1e-6, 1e-8));
  });
}

TEST(Construct, RefusesAParameterThatHasAGradient) {
  auto module = seeded(make_network);
  module->forward(wave({4, 3})).sum().backward();
  const auto error = error_of([&] { FullyShardedDataParallel net(module); });
  EXPECT_TRUE(contains(error, "'input.weight'")) << error;
  EXPECT_TRUE(contains(error, "zero_grad()")) << error;
  module->zero_grad();
  FullyShardedDataParallel net(module);
  EXPECT_TRUE(all_close(net(wave({4, 3})), expected_output(), 1e-6, 1e-8));
}

TEST(Construct, RefusesAParameterThatWasComputed) {
  struct Computed : nn::Module {
    Computed() {
      const auto base = torch::ones({3}, torch::requires_grad());
      weight = register_parameter("weight", base * 2);
    }
    at::Tensor weight;
  };
  const auto error = error_of([] {
    FullyShardedDataParallel<Computed> net(std::make_shared<Computed>());
  });
  EXPECT_TRUE(contains(error, "'weight'")) << error;
  EXPECT_TRUE(contains(error, "leaf")) << error;
}

TEST(Construct, AMovedNetGoesOnTraining) {
  on_ranks(3, [](const World& world) {
    auto module = seeded(make_network);
    Net first(module, world, Options().units(each<Block>()));
    torch::optim::SGD optimizer(first.parameters(), 0.1);
    first(wave({4, 3})).pow(2).mean().backward();
    Net second(std::move(first));
    optimizer.step();
    optimizer.zero_grad();
    second(wave({4, 3})).pow(2).mean().backward();
    optimizer.step();

    const auto plain = seeded(make_network);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      reference.zero_grad();
      plain->forward(wave({4, 3})).pow(2).mean().backward();
      reference.step();
    }
    for (const auto& [name, value] : whole_values(second)) {
      EXPECT_TRUE(all_close(value, plain->named_parameters()[name], 1e-6, 1e-8))
          << name;
    }
  });
}

TEST(Construct, ANetThatWasMovedFromSaysSo) {
  Net first(seeded(make_network));
  const Net second(std::move(first));
  const std::string said = "moved from or unwrapped";
  for (const auto& call : std::vector<std::function<void()>>{
           [&] {
             first(wave({4, 3}));
           },
           [&] { first.call([](NetworkImpl& /*module*/) {}); },
           [&] { first.parameters(); },
           [&] { first.full_sizes("input.weight"); },
           [&] { first.clip_grad_norm_(1.0); },
           [&] { first.clip_grad_value_(1.0); },
           [&] { first.average_ignored_gradients(); },
           [&] { first.check_replicas(); },
           [&] { first.memory(); },
           [&] { first.describe(); },
           [&] { first.world(); },
           [&] { first.unshard(); },
           [&] { first.reshard(); },
           [&] { auto region = first.region(); },
           [&] { auto no_sync = first.no_sync(); },
           [&] { auto whole = first.whole_parameters(); },
           [&] { unwrap(std::move(first)); }}) {
    EXPECT_TRUE(contains(error_of(call), said)) << error_of(call);
  }
}

TEST(Construct, AssigningANetEndsTheOneThatWasThere) {
  on_ranks(2, [](const World& world) {
    auto old = seeded(make_network);
    Net net(old, world);
    net = Net(seeded(make_network, 2), world);
    EXPECT_NE(net.operator->(), old.get());
    const auto plain = seeded(make_network, 2);
    EXPECT_TRUE(
        all_close(net(wave({4, 3})), plain->forward(wave({4, 3})), 1e-6, 1e-8));
  });
}

TEST(Construct, UnwrapGivesTheTrainedModuleBackWhole) {
  for (const auto strategy : kAllStrategies) {
    on_ranks(3, [&](const World& world) {
      Net net(
          seeded(make_network),
          world,
          Options().strategy(strategy).units(each<Block>()));
      const auto before = net->parameters();
      torch::optim::SGD optimizer(net.parameters(), 0.1);
      net(wave({4, 3})).pow(2).mean().backward();
      optimizer.step();
      const auto module = unwrap(std::move(net));

      const auto plain = seeded(make_network);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      plain->forward(wave({4, 3})).pow(2).mean().backward();
      reference.step();
      const auto after = module->parameters();
      ASSERT_EQ(before.size(), after.size());
      for (size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(before[i].is_same(after[i]));
        EXPECT_FALSE(after[i].grad().defined());
        EXPECT_TRUE(all_close(after[i], plain->parameters()[i], 1e-6, 1e-8));
      }
      // An ordinary module again: forward, backward and a step by itself.
      const auto x = wave({4, 3});
      module->forward(x).pow(2).mean().backward();
      plain->zero_grad();
      plain->forward(x).pow(2).mean().backward();
      for (size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(all_close(
            after[i].grad(), plain->parameters()[i].grad(), 1e-6, 1e-8));
      }
      optimizer.step();
    });
  }
}

TEST(Construct, UnwrapKeepsTheBitsOfParametersThatComputeInAnotherType) {
  on_ranks(2, [](const World& world) {
    Net net(
        seeded(make_network),
        world,
        Options().mixed_precision({.param_dtype = torch::kBFloat16}));
    const auto module = unwrap(std::move(net));
    const auto plain = seeded(make_network);
    for (const auto& each : plain->named_parameters()) {
      const auto got = module->named_parameters()[each.key()];
      EXPECT_EQ(got.scalar_type(), torch::kFloat);
      EXPECT_TRUE(at::equal(got, each.value())) << each.key();
    }
  });
}

TEST(Construct, OptionsOutOfRangeAreRefused) {
  const auto error_with = [](const Options& options) {
    return error_of([&] { Net net(seeded(make_network), World(), options); });
  };
  const auto slots = error_with(Options().slots(0));
  EXPECT_TRUE(contains(slots, "Options::slots must be at least 1")) << slots;
  EXPECT_TRUE(contains(slots, "got 0")) << slots;
  const auto factor = error_with(Options().gradient_divide_factor(0.0));
  EXPECT_TRUE(contains(factor, "gradient_divide_factor")) << factor;
  EXPECT_TRUE(contains(factor, "other than 0")) << factor;
  const auto ignored = error_with(Options().ignore({"heed"}));
  EXPECT_TRUE(contains(ignored, "'heed'")) << ignored;
}

TEST(Construct, ANanDivideFactorIsRefused) {
  const auto error = error_of([&] {
    Net net(
        seeded(make_network),
        World(),
        Options().gradient_divide_factor(std::nan("")));
  });
  EXPECT_TRUE(contains(error, "gradient_divide_factor")) << error;
}

} // namespace construct
} // namespace fsdp::testing
