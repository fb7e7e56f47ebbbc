// What parameters look like before, inside and after regions.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>

namespace fsdp::testing {
namespace states {

namespace nn = torch::nn;
using at::Tensor;

/// A module with handles of its own on its tensors.
struct HandlesImpl : nn::Module {
  HandlesImpl()
      : weight(register_parameter("weight", torch::randn({3, 5}))),
        linear(register_module("linear", nn::Linear(5, 7))),
        copy(linear->weight),
        batch(register_module("batch", nn::BatchNorm1d(7))) {
    for (auto& each : parameters()) {
      handles.push_back(each);
    }
  }
  Tensor forward(const Tensor& x) {
    return batch(torch::linear(x.matmul(weight), copy, linear->bias));
  }
  Tensor weight;
  nn::Linear linear;
  Tensor copy; // the same tensor as linear->weight
  nn::BatchNorm1d batch;
  std::vector<Tensor> handles;
};
TORCH_MODULE(Handles);

auto make_handles() {
  return std::make_shared<HandlesImpl>();
}

template <class N>
void expect_one_identity(N& net) {
  auto& module = *net.operator->();
  EXPECT_TRUE(module.copy.is_same(module.linear->weight));
  const auto listed = module.parameters();
  const auto named = module.named_parameters();
  ASSERT_EQ(listed.size(), module.handles.size());
  for (size_t i = 0; i < listed.size(); ++i) {
    EXPECT_TRUE(listed[i].is_same(module.handles[i]));
    EXPECT_TRUE(named[i].value().is_same(module.handles[i]));
  }
  const auto of_net = net.named_parameters();
  ASSERT_EQ(of_net.size(), listed.size());
  for (size_t i = 0; i < listed.size(); ++i) {
    EXPECT_EQ(of_net[i].first, named[i].key());
    EXPECT_TRUE(of_net[i].second.is_same(listed[i]));
    EXPECT_TRUE(net.parameters()[i].is_same(listed[i]));
  }
}

TEST(States, AllHandlesStayOneTensor) {
  for (const auto strategy : kAllStrategies) {
    on_ranks(3, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_handles), world, Options().strategy(strategy));
      expect_one_identity(net);
      {
        const auto region = net.region();
        expect_one_identity(net);
        EXPECT_EQ(net->copy.sizes(), at::IntArrayRef({7, 5}));
        EXPECT_EQ(net->weight.sizes(), at::IntArrayRef({3, 5}));
      }
      expect_one_identity(net);
      const auto y = net(wave({4, 3}));
      expect_one_identity(net);
      y.pow(2).mean().backward();
      expect_one_identity(net);
      {
        const auto whole = net.whole_parameters();
        expect_one_identity(net);
      }
      torch::optim::SGD(net->parameters(), 0.1).step();
      expect_one_identity(net);
    });
  }
}

TEST(States, ShapesAreShardsOutsideAndWholeInside) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    const auto plain = seeded(make_network);
    const auto named = net->named_parameters();
    const auto numels = [&] {
      std::vector<int64_t> all;
      for (const auto& each : named) {
        all.push_back(each.value().dim() == 1 ? each.value().numel() : -1);
      }
      return all;
    };
    const auto expect_shards = [&] {
      int64_t index = 0;
      for (const auto& unit : net.describe().units) {
        for (const auto& parameter : unit.parameters) {
          const auto& tensor = named[parameter.names[0]];
          EXPECT_EQ(tensor.sizes(), at::IntArrayRef({parameter.local_numel}));
          EXPECT_TRUE(tensor.is_leaf());
          ++index;
        }
      }
      EXPECT_EQ(index, static_cast<int64_t>(named.size()));
    };
    const auto expect_whole = [&] {
      for (const auto& each : plain->named_parameters()) {
        EXPECT_EQ(named[each.key()].sizes(), each.value().sizes())
            << each.key();
      }
    };
    expect_shards();
    Tensor y;
    {
      auto region = net.region();
      expect_whole(); // also of units that nothing has touched
      y = net(wave({4, 3}));
      expect_whole();
    }
    expect_shards();
    const auto before = numels();
    y.register_hook([&](const Tensor& /*gradient*/) { expect_whole(); });
    y.sum().backward();
    expect_shards();
    EXPECT_EQ(numels(), before);
  });
}

TEST(States, ShardsOfAllRanksAreTheModel) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_network), world, Options().units(each<Block>()));
      const auto plain = seeded(make_network);
      for (const auto& unit : net.describe().units) {
        for (const auto& parameter : unit.parameters) {
          const auto& name = parameter.names[0];
          const auto shard =
              net->named_parameters()[name].detach().contiguous();
          std::string bytes;
          for (const auto& part : world.communicator().exchange(
                   {static_cast<const char*>(shard.const_data_ptr()),
                    shard.nbytes()},
                   "shards of a test")) {
            bytes += part;
          }
          const auto whole = plain->named_parameters()[name];
          ASSERT_EQ(bytes.size(), whole.nbytes()) << name;
          EXPECT_EQ(
              std::memcmp(bytes.data(), whole.const_data_ptr(), bytes.size()),
              0)
              << name;
        }
      }
    });
  }
}

TEST(States, FullSizesAnswerInEveryState) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().ignore({"head.bias"}));
    const auto expect_sizes = [&] {
      EXPECT_EQ(
          net.full_sizes("layers.0.up.weight"), (std::vector<int64_t>{11, 5}));
      EXPECT_EQ(net.full_sizes("head.weight"), (std::vector<int64_t>{2, 5}));
      EXPECT_EQ(net.full_sizes("head.bias"), (std::vector<int64_t>{2}));
    };
    expect_sizes();
    {
      const auto region = net.region();
      expect_sizes();
    }
    expect_sizes();
    const auto error = error_of([&] { net.full_sizes("head.wait"); });
    EXPECT_TRUE(contains(error, "'head.wait'")) << error;
    EXPECT_TRUE(contains(error, "describe()")) << error;
  });
}

TEST(States, AnAdapterCanBeBuiltFromFullSizes) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    const auto sizes = net.full_sizes("head.weight");
    auto adapter = seeded([&] { return nn::Linear(sizes[1], sizes[0]); });
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    const auto y = net.call(&NetworkImpl::features, x);
    EXPECT_TRUE(all_close(adapter(y), adapter(plain->features(x)), 1e-6, 1e-8));
  });
}

TEST(States, BuffersAreLeftAlone) {
  for (const int size : {1, 3}) {
    on_ranks(size, [](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_handles),
          world,
          Options().mixed_precision({.param_dtype = torch::kBFloat16}));
      const auto plain = seeded(make_handles);
      ASSERT_EQ(net->buffers().size(), 3U);
      for (const auto& each : net->named_buffers()) {
        const auto expected = plain->named_buffers()[each.key()];
        EXPECT_EQ(each.value().scalar_type(), expected.scalar_type());
        EXPECT_TRUE(at::equal(each.value(), expected));
      }
    });
  }
}

TEST(States, RunningStatisticsAreThoseOfTheRanksOwnRows) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_handles), world);
    const auto plain = seeded(make_handles);
    const auto x = wave({6, 3}, 0.5 + world.rank());
    net(x).sum().backward();
    plain->forward(x);
    EXPECT_TRUE(all_close(
        net->batch->running_mean, plain->batch->running_mean, 1e-6, 1e-8));
    EXPECT_TRUE(all_close(
        net->batch->running_var, plain->batch->running_var, 1e-6, 1e-8));
    EXPECT_EQ(net->batch->num_batches_tracked.item<int64_t>(), 1);
  });
}

TEST(States, FrozenParametersStayFrozen) {
  const auto make = [] {
    auto module = make_network();
    module->input->weight.requires_grad_(false);
    module->layers[0]->as<BlockImpl>()->up->bias.requires_grad_(false);
    return module;
  };
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make,
      [](auto& net, Log& log) {
        // All parameters, with weight decay: without a gradient none moves.
        torch::optim::AdamW optimizer(
            net.parameters(),
            torch::optim::AdamWOptions(0.01).weight_decay(0.5).eps(1e-4));
        for (int step = 0; step < 3; ++step) {
          auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
          loss.backward();
          log.loss(loss);
          log.gradients(net);
          const auto named = net->named_parameters();
          EXPECT_FALSE(named["input.weight"].requires_grad());
          EXPECT_FALSE(named["layers.0.up.bias"].requires_grad());
          EXPECT_FALSE(named["input.weight"].grad().defined());
          EXPECT_TRUE(named["input.bias"].requires_grad());
          optimizer.step();
          optimizer.zero_grad();
          log.parameters(net);
        }
      },
      settings);
}

TEST(States, FreezingAndThawingLaterIsHonoured) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::AdamW optimizer(
            net.parameters(),
            torch::optim::AdamWOptions(0.01).weight_decay(0.1).eps(1e-4));
        auto frozen = net->named_parameters()["layers.1.up.weight"];
        auto first = net->named_parameters()["input.weight"];
        for (int step = 0; step < 6; ++step) {
          frozen.requires_grad_(step / 2 != 1);
          first.requires_grad_(step % 2 == 0);
          auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
          loss.backward();
          log.loss(loss);
          log.gradients(net);
          EXPECT_EQ(frozen.grad().defined(), step / 2 != 1);
          EXPECT_EQ(first.grad().defined(), step % 2 == 0);
          optimizer.step();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

TEST(States, AFrozenWeightCanStartToTrain) {
  const auto make = [] {
    auto module = make_network();
    module->layers[0]->as<BlockImpl>()->up->weight.requires_grad_(false);
    return module;
  };
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          if (step == 2) {
            net->named_parameters()["layers.0.up.weight"].requires_grad_();
          }
          auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
          loss.backward();
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

} // namespace states
} // namespace fsdp::testing
