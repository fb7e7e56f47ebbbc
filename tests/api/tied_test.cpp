// One tensor under several names.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace tied {

namespace nn = torch::nn;
using at::Tensor;

/// A projection with the weight of an embedding.
struct OutputImpl : nn::Module {
  explicit OutputImpl(const Tensor& shared)
      : weight(register_parameter("weight", shared)),
        bias(register_parameter("bias", torch::zeros({shared.size(0)}))) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, weight, bias); }
  Tensor weight, bias;
};
TORCH_MODULE(Output);

struct LanguageModel : nn::Module {
  LanguageModel()
      : embed(register_module("embed", nn::Embedding(8, 4))),
        block(register_module("block", Block(4))),
        output(register_module("output", Output(embed->weight))) {}
  Tensor forward(const Tensor& tokens) { return output(block(embed(tokens))); }
  nn::Embedding embed;
  Block block;
  Output output;
};

auto make_model() {
  return std::make_shared<LanguageModel>();
}

Tensor tokens() {
  return torch::arange(kRows).mul(5).remainder(8);
}

const std::vector<UnitPolicy>& policies() {
  static const std::vector<UnitPolicy> all = {
      UnitPolicy(),
      each<Block>(),
      each<nn::Embedding>() | each<Block>() | each<Output>(),
      together({"embed", "output"}) | each<Block>()};
  return all;
}

TEST(Tied, TrainingSumsBothUses) {
  for (const auto& policy : policies()) {
    ProgramSettings settings;
    settings.options.units(policy);
    expect_same_program(
        make_model,
        [](auto& net, Log& log) {
          torch::optim::AdamW optimizer(
              net.parameters(), torch::optim::AdamWOptions(0.01).eps(1e-4));
          for (int step = 0; step < 4; ++step) {
            const auto mine = log.mine(tokens());
            auto loss = nn::functional::cross_entropy(
                net(mine), (mine * 3).remainder(8));
            loss.backward();
            log.loss(loss);
            log.gradients(net);
            optimizer.step();
            optimizer.zero_grad();
            log.parameters(net);
            EXPECT_TRUE(net->embed->weight.is_same(net->output->weight));
          }
        },
        settings);
  }
}

TEST(Tied, CountsOnceInListsAndInTheNorm) {
  for (const auto& policy : policies()) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_model), world, Options().units(policy));
      EXPECT_EQ(net.parameters().size(), 8U); // 6 of the block
      const std::vector<std::string> names = {"embed.weight", "output.weight"};
      int found = 0;
      for (const auto& unit : net.describe().units) {
        for (const auto& parameter : unit.parameters) {
          found += parameter.names == names ? 1 : 0;
          EXPECT_TRUE(parameter.names == names || parameter.names.size() == 1U);
        }
      }
      EXPECT_EQ(found, 1);
      for (const auto& name : names) {
        EXPECT_EQ(net.full_sizes(name), (std::vector<int64_t>{8, 4}));
      }
      const auto plain = seeded(make_model);
      net(tokens()).pow(2).mean().backward();
      plain->forward(tokens()).pow(2).mean().backward();
      const double norm = nn::utils::clip_grad_norm_(
          tensors_of(distinct_parameters(*plain)), 1e9);
      EXPECT_NEAR(net.clip_grad_norm_(1e9), norm, 1e-6 * norm);
    });
  }
}

TEST(Tied, TheFirstPlaceOwnsTheTensor) {
  FullyShardedDataParallel net(
      seeded(make_model),
      World(),
      Options().units(each<nn::Embedding>() | each<Block>() | each<Output>()));
  const auto units = net.describe().units;
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(units[0].name, "embed");
  EXPECT_EQ(units[2].name, "output");
  ASSERT_EQ(units[2].parameters.size(), 1U);
  EXPECT_EQ(
      units[2].parameters[0].names, std::vector<std::string>{"output.bias"});
}

TEST(Tied, OneModuleUnderTwoNames) {
  struct Twice : nn::Module {
    Twice()
        : first(register_module("first", nn::Linear(3, 3))),
          second(register_module("second", first)) {}
    Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }
    nn::Linear first, second;
  };
  for (const auto& policy : {UnitPolicy(), each<nn::Linear>()}) {
    ProgramSettings settings;
    settings.options.units(policy);
    expect_same_program(
        [] { return std::make_shared<Twice>(); },
        [](auto& net, Log& log) {
          torch::optim::SGD optimizer(net.parameters(), 0.1);
          for (int step = 0; step < 3; ++step) {
            auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
            loss.backward();
            log.loss(loss);
            optimizer.step();
            optimizer.zero_grad();
          }
          log.value("sum", values_of(net)[0].second.sum());
        },
        settings);
  }
}

TEST(Tied, IgnoringOneNameIgnoresTheTensor) {
  on_ranks(2, [](const World& world) {
    for (const auto* name : {"embed.weight", "output.weight"}) {
      FullyShardedDataParallel net(
          seeded(make_model), world, Options().ignore({name}));
      EXPECT_EQ(net->embed->weight.sizes(), at::IntArrayRef({8, 4})) << name;
      EXPECT_TRUE(net->embed->weight.is_same(net->output->weight));
      EXPECT_EQ(net.parameters().size(), 8U);
      for (const auto* each : {"embed.weight", "output.weight"}) {
        EXPECT_EQ(net.full_sizes(each), (std::vector<int64_t>{8, 4})) << each;
      }
      const auto plain = seeded(make_model);
      EXPECT_TRUE(
          all_close(net(tokens()), plain->forward(tokens()), 1e-6, 1e-8));
    }
  });
}

TEST(Tied, TensorsOnOneStorageAreRefusedByName) {
  const auto make = [] {
    auto model = make_model();
    model->output->weight.set_data(torch::zeros({8, 4}));
    return model;
  };
  struct Views : nn::Module {
    Views() {
      const auto both = torch::zeros({4, 3});
      upper = register_parameter("upper", torch::zeros({2, 3}));
      lower = register_parameter("lower", torch::zeros({2, 3}));
      upper.set_data(both.slice(0, 0, 2));
      lower.set_data(both.slice(0, 2, 4));
    }
    Tensor upper, lower;
  };
  const auto error =
      error_of([] { FullyShardedDataParallel net(std::make_shared<Views>()); });
  EXPECT_TRUE(contains(error, "'upper'")) << error;
  EXPECT_TRUE(contains(error, "'lower'")) << error;
  FullyShardedDataParallel apart(seeded(make)); // no false alarm
  EXPECT_EQ(apart.parameters().size(), 8U);
}

TEST(Tied, NoFalseAlarmWhenAddressesRecur) {
  on_ranks(2, [](const World& world) {
    const auto x = wave({2, 5});
    auto plain = seeded([] { return Block(5); });
    const auto expected = plain->forward(x);
    for (int i = 0; i < 50; ++i) {
      FullyShardedDataParallel net(seeded([] { return Block(5); }), world);
      EXPECT_EQ(net.parameters().size(), 6U);
      EXPECT_TRUE(all_close(net(x), expected, 1e-6, 1e-8));
      net(x).sum().backward();
    }
  });
}

} // namespace tied
} // namespace fsdp::testing
