// The order of collectives does not depend on addresses or on the rank.

#include "api/counting_communicator.h"
#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

namespace fsdp::testing {
namespace order {

namespace nn = torch::nn;
using at::Tensor;

/// Branches of equal depth and size: a mix-up would go unnoticed.
struct Branches : nn::Module {
  Branches() {
    for (int i = 0; i < 4; ++i) {
      branches.push_back(
          register_module("branch" + std::to_string(i), nn::Linear(4, 4)));
    }
  }
  Tensor forward(const Tensor& x) {
    auto sum = torch::zeros_like(x);
    int64_t weight = 1;
    for (auto& branch : branches) {
      sum = sum + static_cast<double>(weight++) * torch::tanh(branch(x));
    }
    return sum;
  }
  std::vector<nn::Linear> branches;
};

auto make_branches() {
  return std::make_shared<Branches>();
}

const auto kUnits = Options().units(each<nn::Linear>());

TEST(Order, DoesNotDependOnAddresses) {
  const auto plain = seeded(make_branches);
  const auto x = wave({4, 4});
  plain->forward(x).pow(2).mean().backward();
  on_ranks(3, [&](const World& world) {
    std::vector<Tensor> clutter;
    const auto module = seeded([&] {
      for (int i = 0; i < 1000 * world.rank(); ++i) {
        clutter.push_back(torch::zeros({4, 4}));
      }
      torch::manual_seed(1);
      return make_branches();
    });
    FullyShardedDataParallel net(module, world, kUnits);
    for (int step = 0; step < 3; ++step) {
      clutter.resize(clutter.size() / 2);
      net(x).pow(2).mean().backward();
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(all_close(
            gradient, plain->named_parameters()[name].grad(), 1e-6, 1e-8))
            << name;
      }
      net->zero_grad();
    }
  });
}

TEST(Order, IsTheSameOnAllRanks) {
  on_ranks(3, [](const World& world) {
    auto counter = std::make_shared<CountingCommunicator>(world);
    FullyShardedDataParallel net(seeded(make_branches), World(counter), kUnits);
    for (int step = 0; step < 3; ++step) {
      counter->notes().clear();
      net(wave({4, 4})).pow(2).mean().backward();
      net->zero_grad();
      std::string gathers;
      std::string reductions;
      for (const auto& note : counter->notes()) {
        (contains(note, "reduce_scatter") ? reductions : gathers) +=
            note + "\n";
      }
      EXPECT_EQ(counter->count("reduce_scatter"), 4);
      for (const auto& all :
           {world.communicator().exchange(gathers, "test"),
            world.communicator().exchange(reductions, "test")}) {
        EXPECT_EQ(all, std::vector<std::string>(3, all[0]));
      }
    }
  });
}

TEST(Order, RanksThatUseUnitsInAnotherOrderAreTold) {
  std::vector<std::string> errors(2);
  const auto x = wave({4, 4});
  on_ranks(2, [&](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_branches), gathering_world(world), kUnits);
    const auto first = static_cast<size_t>(world.rank());
    errors[first] = error_of([&] {
      net.call([&](Branches& module) {
        module.branches[first](x);
        module.branches[1 - first](x);
      });
    });
    // Both failed together, so both can go on.
    const auto plain = seeded(make_branches);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
  share_results(errors);
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "all_gather of unit 'branch0'")) << error;
    EXPECT_TRUE(contains(error, "all_gather of unit 'branch1'")) << error;
  }
}

TEST(Order, GradientsMayArriveInAnotherOrderOnEachRank) {
  // The forward order is the same, so gathers match; the backward pass visits
  // branches in the order in which losses were added up.
  const auto x = wave({4, 4});
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_branches),
        world,
        Options().units(each<nn::Linear>()).strategy(Strategy::kShardGradOp));
    const auto plain = seeded(make_branches);
    for (int step = 0; step < 4; ++step) {
      std::vector<Tensor> outputs;
      net.call([&](Branches& module) {
        for (auto& branch : module.branches) {
          outputs.push_back(branch(x).pow(2).mean());
        }
      });
      const auto turn = (world.rank() + step) % 4;
      std::rotate(outputs.begin(), outputs.begin() + turn, outputs.end());
      auto region = net.region();
      for (auto& output : outputs) {
        output.backward();
      }
      region.close();
      plain->zero_grad();
      for (auto& branch : plain->branches) {
        branch(x).pow(2).mean().backward();
      }
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(all_close(
            gradient, plain->named_parameters()[name].grad(), 1e-6, 1e-8))
            << name;
      }
      net->zero_grad();
    }
  });
}

} // namespace order
} // namespace fsdp::testing
