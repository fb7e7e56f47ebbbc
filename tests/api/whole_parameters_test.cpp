// All weights at once: unshard, reshard and whole_parameters.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>

namespace fsdp::testing {
namespace whole {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

constexpr Strategy kStrategies[] = {
    Strategy::kFullShard,
    Strategy::kShardGradOp,
    Strategy::kShardOptimizer,
    Strategy::kNoShard};

/// Runs `body` in worlds of 1 to 4 ranks and with all strategies.
void with_nets(const std::function<void(Net& net, NetworkImpl& plain)>& body) {
  for (const auto strategy : kStrategies) {
    for (const int size : {1, 2, 3, 4}) {
      SCOPED_TRACE("strategy " + std::to_string(static_cast<int>(strategy)));
      on_ranks(size, [&](const World& world) {
        Net net(
            seeded(make_network),
            world,
            Options().strategy(strategy).units(each<Block>()));
        body(net, *seeded(make_network));
      });
    }
  }
}

void expect_parameters(Net& net, const NetworkImpl& plain) {
  const auto expected = plain.named_parameters();
  for (const auto& [name, value] : whole_values(net)) {
    EXPECT_TRUE(all_close(value, expected[name], 1e-6, 1e-8)) << name;
  }
}

TEST(WholeParameters, AreWholeTogetherAndReadWithoutOperators) {
  with_nets([](Net& net, NetworkImpl& plain) {
    {
      const auto whole = net.whole_parameters();
      for (const auto& each : plain.named_parameters()) {
        const auto tensor = net->named_parameters()[each.key()];
        ASSERT_EQ(tensor.sizes(), each.value().sizes());
        EXPECT_EQ(
            std::memcmp(
                tensor.const_data_ptr<float>(),
                each.value().const_data_ptr<float>(),
                each.value().nbytes()),
            0)
            << each.key();
      }
    }
    EXPECT_EQ(net.memory().gathered_bytes, 0);
  });
}

TEST(WholeParameters, AreShardsAgainAfterwards) {
  on_ranks(3, [](const World& world) {
    Net net(seeded(make_network), world);
    const auto shard = net->head->weight.sizes().vec();
    {
      const auto whole = net.whole_parameters();
      EXPECT_EQ(net->head->weight.dim(), 2);
    }
    EXPECT_EQ(net->head->weight.sizes().vec(), shard);
  });
}

void edit(NetworkImpl& module) {
  const torch::NoGradGuard no_grad;
  module.head->weight.fill_(0.25);
  module.layers[0]->as<BlockImpl>()->up->weight.select(1, 3).neg_();
  module.norm->bias.data_ptr<float>()[4] = 9.0F; // without an operator
}

TEST(WholeParameters, ChangesAreKeptOnRequest) {
  with_nets([](Net& net, NetworkImpl& plain) {
    {
      const auto whole = net.whole_parameters({.write_back = true});
      edit(*net.operator->());
    }
    edit(plain);
    expect_parameters(net, plain);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain.forward(x), 1e-6, 1e-8));
  });
}

TEST(WholeParameters, ChangesAreDroppedOtherwise) {
  with_nets([](Net& net, NetworkImpl& plain) {
    {
      const auto whole = net.whole_parameters();
      edit(*net.operator->());
    }
    expect_parameters(net, plain);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain.forward(x), 1e-6, 1e-8));
  });
}

TEST(WholeParameters, TheModuleIsAnOrdinaryOneInside) {
  with_nets([](Net& net, NetworkImpl& plain) {
    const auto x = wave({4, 3});
    {
      const auto whole = net.whole_parameters();
      EXPECT_TRUE(all_close(net->forward(x), plain.forward(x), 1e-6, 1e-8));
      const auto sum = net->head->weight.sum(); // recorded, and not refused
      EXPECT_TRUE(sum.requires_grad());
      const auto error = error_of([&] { net(x); });
      EXPECT_TRUE(contains(error, "whole_parameters() is open")) << error;
      EXPECT_TRUE(contains(error, "module->forward(x)")) << error;
    }
    EXPECT_TRUE(all_close(net(x), plain.forward(x), 1e-6, 1e-8));
  });
}

TEST(WholeParameters, CanBeClosedEarly) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world);
    auto whole = net.whole_parameters({.write_back = true});
    edit(*net.operator->());
    whole.close();
    EXPECT_EQ(net->head->weight.dim(), 1);
    auto plain = seeded(make_network);
    edit(*plain);
    expect_parameters(net, *plain);
    whole.close(); // again: nothing happens
    expect_parameters(net, *plain);
  });
}

TEST(WholeParameters, ShapesAreGuarded) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world);
    auto whole = net.whole_parameters({.write_back = true});
    net->head->weight.set_data(torch::zeros({7, 5}));
    const auto error = error_of([&] { whole.close(); });
    EXPECT_TRUE(contains(error, "'head.weight'")) << error;
    EXPECT_TRUE(contains(error, "expected 10 elements")) << error;
    EXPECT_TRUE(contains(error, "got 35")) << error;
    expect_parameters(net, *seeded(make_network));
  });
}

TEST(WholeParameters, ReplacedTensorsAreKeptOnRequest) {
  with_nets([](Net& net, NetworkImpl& plain) {
    {
      const auto whole = net.whole_parameters({.write_back = true});
      net->head->weight.set_data(wave({2, 5}));
    }
    plain.head->weight.set_data(wave({2, 5}));
    expect_parameters(net, plain);
  });
}

TEST(WholeParameters, DoNotNest) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world);
    {
      const auto whole = net.whole_parameters();
      const auto error =
          error_of([&] { const auto again = net.whole_parameters(); });
      EXPECT_TRUE(contains(error, "or of another one")) << error;
      EXPECT_EQ(net->head->weight.dim(), 2);
    }
    net.call([&](NetworkImpl& /*module*/) {
      const auto error =
          error_of([&] { const auto again = net.whole_parameters(); });
      EXPECT_TRUE(contains(error, "inside of a region")) << error;
    });
    expect_parameters(net, *seeded(make_network));
  });
}

TEST(WholeParameters, CanBeMoved) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world);
    {
      auto whole = net.whole_parameters({.write_back = true});
      {
        const auto moved = std::move(whole);
        const torch::NoGradGuard no_grad;
        net->head->bias.fill_(3);
        EXPECT_EQ(net->head->weight.dim(), 2);
      }
      EXPECT_EQ(net->head->weight.dim(), 1); // closed by the new owner
    }
    const auto plain = seeded(make_network);
    {
      const torch::NoGradGuard no_grad;
      plain->head->bias.fill_(3);
    }
    expect_parameters(net, *plain);
  });
}

TEST(WholeParameters, AnExceptionInsideLeavesTheNetAsItWas) {
  on_ranks(3, [](const World& world) {
    Net net(seeded(make_network), world);
    EXPECT_THROW(
        ([&] {
          const auto whole = net.whole_parameters();
          edit(*net.operator->());
          throw std::runtime_error("a disk is full");
        })(),
        std::runtime_error);
    expect_parameters(net, *seeded(make_network));
  });
}

TEST(WholeParameters, HaveTheTypeAndTheBitsThatAreTrained) {
  // The place to copy a model from; rounding to the compute type would be lost
  // precision in every file that is written from it.
  on_ranks(2, [](const World& world) {
    Net net(
        seeded(make_network),
        world,
        Options()
            .units(each<Block>())
            .mixed_precision({.param_dtype = torch::kBFloat16}));
    const auto plain = seeded(make_network);
    const auto whole = net.whole_parameters();
    for (const auto& each : plain->named_parameters()) {
      const auto got = net->named_parameters()[each.key()];
      EXPECT_EQ(got.scalar_type(), torch::kFloat) << each.key();
      EXPECT_TRUE(at::equal(got.to(torch::kFloat), each.value())) << each.key();
    }
  });
}

TEST(WholeParameters, AreUntouchedByMixedPrecisionWithoutWriting) {
  on_ranks(2, [](const World& world) {
    Net net(
        seeded(make_network),
        world,
        Options().mixed_precision({.param_dtype = torch::kBFloat16}));
    std::vector<Tensor> before;
    for (const auto& parameter : net.parameters()) {
      before.push_back(parameter.detach().clone());
    }
    for (const bool write_back : {false, true}) {
      { const auto whole = net.whole_parameters({.write_back = write_back}); }
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(before[i], net.parameters()[i].detach()));
      }
    }
  });
}

} // namespace whole
} // namespace fsdp::testing
