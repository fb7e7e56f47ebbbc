// Parameters of unusual shapes, layouts and types.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <map>

namespace fsdp::testing {
namespace shapes {

namespace nn = torch::nn;
using at::Tensor;

/// Trains with AdamW and logs everything that should not depend on sharding.
constexpr auto kTrain = [](auto& net, Log& log) {
  torch::optim::AdamW optimizer(
      net.parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-4));
  for (int step = 0; step < 3; ++step) {
    const auto x = log.mine(wave({kRows, 3}, 0.7 + step));
    auto loss = net(x).pow(2).mean();
    loss.backward();
    log.loss(loss);
    log.gradients(net);
    optimizer.step();
    optimizer.zero_grad();
    log.parameters(net);
  }
};

template <class M, class... A>
auto maker(A... arguments) {
  return [=] { return std::make_shared<M>(arguments...); };
}

struct Rows : nn::Module {
  Rows() {
    for (const int64_t rows : {5, 3, 2, 1}) {
      weights.push_back(register_parameter(
          "w" + std::to_string(rows), torch::randn({rows, 3})));
    }
  }
  Tensor forward(const Tensor& x) {
    return torch::tanh(x.matmul(torch::cat(weights).t()));
  }
  std::vector<Tensor> weights;
};

TEST(Shapes, FewerRowsThanRanks) {
  expect_same_program(maker<Rows>(), kTrain);
}

TEST(Shapes, MoreRanksThanElements) {
  ProgramSettings settings;
  settings.world_sizes = {6};
  settings.strategies = {Strategy::kFullShard};
  expect_same_program(maker<Rows>(), kTrain, settings);
}

constexpr std::array<int64_t, 7> kNumels = {5, 7, 1, 300, 129, 64, 2};

/// One group whose members straddle the cuts between ranks.
struct Straddling : nn::Module {
  Straddling() {
    for (const auto numel : kNumels) {
      weights.push_back(register_parameter(
          "w" + std::to_string(numel), torch::randn({numel})));
    }
  }
  /// The gradient of element i is i + 1.
  Tensor forward() {
    auto sum = torch::zeros({});
    for (const auto& weight : weights) {
      const auto place = torch::arange(1, weight.numel() + 1, torch::kFloat);
      sum = sum + (weight * place).sum();
    }
    return sum;
  }
  std::vector<Tensor> weights;
};

TEST(Shapes, EachElementGetsItsOwnGradientAndPaddingNone) {
  double squares = 0;
  for (const auto n : kNumels) {
    squares += static_cast<double>(n * (n + 1) * (2 * n + 1)) / 6;
  }
  const double norm = std::sqrt(squares);
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [&](const World& world) {
      FullyShardedDataParallel net(seeded(maker<Straddling>()), world);
      net().backward();
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(at::equal(
            gradient, torch::arange(1, gradient.numel() + 1, torch::kFloat)))
            << name;
      }
      EXPECT_NEAR(net.clip_grad_norm_(1e9), norm, 1e-6 * norm);
    });
  }
}

struct Scaled : nn::Module {
  explicit Scaled(std::vector<int64_t> sizes)
      : scale(register_parameter("scale", torch::full(sizes, 0.5))),
        linear(register_module("linear", nn::Linear(3, 2))) {}
  Tensor forward(const Tensor& x) { return linear(x) * scale; }
  Tensor scale;
  nn::Linear linear;
};
struct Around : nn::Module {
  explicit Around(std::vector<int64_t> sizes)
      : inner(register_module("inner", std::make_shared<Scaled>(sizes))),
        outer(register_module("outer", nn::Linear(2, 2))) {}
  Tensor forward(const Tensor& x) { return outer(inner->forward(x)); }
  std::shared_ptr<Scaled> inner;
  nn::Linear outer;
};

TEST(Shapes, AScalarParameterTrains) {
  ProgramSettings settings;
  settings.options.units(each<Scaled>());
  expect_same_program(maker<Around>(std::vector<int64_t>{}), kTrain, settings);
}

TEST(Shapes, ASmallParameterOfANestedUnitTrains) {
  ProgramSettings settings;
  settings.options.units(each<Scaled>());
  for (const int64_t numel : {1, 2}) {
    expect_same_program(
        maker<Around>(std::vector<int64_t>{numel}), kTrain, settings);
  }
}

struct Empty : nn::Module {
  Empty()
      : none(register_module(
            "none",
            nn::Linear(nn::LinearOptions(3, 0).bias(false)))),
        some(register_module("some", nn::Linear(3, 2))) {}
  Tensor forward(const Tensor& x) { return torch::cat({none(x), some(x)}, 1); }
  nn::Linear none, some;
};

TEST(Shapes, AParameterWithoutElementsKeepsItsShape) {
  expect_same_program(maker<Empty>(), kTrain);
  ProgramSettings settings;
  settings.options.units(each<nn::Linear>());
  expect_same_program(maker<Empty>(), kTrain, settings);
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(maker<Empty>()), world);
    EXPECT_EQ(net.full_sizes("none.weight"), (std::vector<int64_t>{0, 3}));
    const auto sizes = net.call(
        [](Empty& module) { return module.none->weight.sizes().vec(); });
    EXPECT_EQ(sizes, (std::vector<int64_t>{0, 3}));
  });
}

struct Strided : nn::Module {
  Strided()
      : transposed(
            register_parameter("transposed", torch::randn({4, 3}).t().clone())),
        conv(register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 3, 2)))) {
    const torch::NoGradGuard no_grad;
    conv->weight.set_data(
        conv->weight.data().contiguous(at::MemoryFormat::ChannelsLast));
  }
  Tensor forward(const Tensor& x) {
    const auto image = x.matmul(transposed).view({-1, 2, 2, 1});
    return conv(image.expand({-1, 2, 2, 3}));
  }
  Tensor transposed;
  nn::Conv2d conv;
};

TEST(Shapes, NonContiguousParametersKeepTheirValues) {
  const auto plain = seeded(maker<Strided>());
  ASSERT_FALSE(plain->transposed.is_contiguous());
  ASSERT_FALSE(plain->conv->weight.is_contiguous());
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel net(seeded(maker<Strided>()), world);
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(at::equal(value, plain->named_parameters()[name])) << name;
    }
  });
  ProgramSettings settings;
  settings.same_bits = false; // replicated weights keep their strides
  expect_same_program(maker<Strided>(), kTrain, settings);
}

struct Transposed : nn::Module {
  Transposed()
      : base(torch::randn({4, 3})),
        weight(register_parameter("weight", base.t())) {}
  Tensor forward(const Tensor& x) { return x.matmul(weight); }
  Tensor base, weight;
};

TEST(Shapes, AViewThatSomebodyElseSharesIsRefusedByName) {
  const auto module = seeded(maker<Transposed>());
  const auto error = error_of([&] { FullyShardedDataParallel net(module); });
  EXPECT_TRUE(contains(error, "'weight'")) << error;
  EXPECT_TRUE(contains(error, "clone()")) << error;
  module->base.reset();
  FullyShardedDataParallel net(module);
  const auto plain = seeded(maker<Transposed>());
  const auto x = wave({2, 3});
  EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
}

struct WithBytes : nn::Module {
  WithBytes() : linear(register_module("linear", nn::Linear(3, 2))) {
    codes = register_parameter(
        "codes",
        torch::arange(7, torch::kInt).to(torch::kByte) * 37,
        /*requires_grad=*/false);
    flags = register_parameter(
        "flags", torch::arange(5).remainder(2).to(torch::kBool), false);
    table = register_parameter(
        "table", torch::arange(3) * int64_t{1'000'000'007}, false);
  }
  Tensor forward(const Tensor& x) {
    seen_types = {
        codes.scalar_type(), flags.scalar_type(), table.scalar_type()};
    return linear(x) * codes.to(x.scalar_type()).mean() *
        flags.sum().to(x.scalar_type());
  }
  Tensor codes, flags, table;
  nn::Linear linear;
  std::vector<at::ScalarType> seen_types;
};

TEST(Shapes, IntegerParametersAreShardedBitByBit) {
  constexpr auto train = [](auto& net, Log& log) {
    torch::optim::SGD optimizer(net.parameters(), 1e-5);
    for (int step = 0; step < 3; ++step) {
      auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
      loss.backward();
      log.loss(loss);
      log.gradients(net);
      optimizer.step();
      optimizer.zero_grad();
      log.parameters(net);
    }
  };
  expect_same_program(maker<WithBytes>(), train);
}

TEST(Shapes, MixedPrecisionDoesNotCastIntegers) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(maker<WithBytes>()),
        world,
        Options().mixed_precision({.param_dtype = torch::kBFloat16}));
    net(wave({4, 3}).to(torch::kBFloat16)).sum().backward();
    EXPECT_EQ(
        net->seen_types,
        (std::vector<at::ScalarType>{
            torch::kByte, torch::kBool, torch::kLong}));
    for (const auto& [name, value] : whole_values(net)) {
      if (name == "table") {
        EXPECT_TRUE(
            at::equal(value, torch::arange(3) * int64_t{1'000'000'007}));
      }
    }
    EXPECT_FALSE(net->codes.grad().defined());
    EXPECT_FALSE(net->codes.requires_grad());
  });
}

struct ManyTypes : nn::Module {
  ManyTypes()
      : norm(register_parameter("norm", torch::full({4}, 2.0))),
        linear(register_module("linear", nn::Linear(4, 3))),
        scale(register_parameter(
            "scale",
            torch::full({2}, 0.5, torch::kDouble))) {
    linear->to(torch::kBFloat16);
  }
  /// Gradients that bfloat16 holds exactly: 1, 2 and 4 for all elements.
  Tensor forward() {
    return norm.sum().to(torch::kDouble) +
        2 * (linear->weight.sum() + linear->bias.sum()).to(torch::kDouble) +
        4 * scale.sum();
  }
  Tensor norm;
  nn::Linear linear;
  Tensor scale;
};

TEST(Shapes, OneUnitMayHoldSeveralTypes) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    on_ranks(4, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(maker<ManyTypes>()), world, Options().strategy(strategy));
      net().backward();
      std::map<std::string, double> expected = {
          {"norm", 1}, {"linear.weight", 2}, {"linear.bias", 2}, {"scale", 4}};
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(
            at::equal(gradient, torch::full_like(gradient, expected.at(name))))
            << name;
      }
      const auto parameters = net->named_parameters();
      EXPECT_EQ(parameters["norm"].grad().scalar_type(), torch::kFloat);
      EXPECT_EQ(
          parameters["linear.weight"].grad().scalar_type(), torch::kBFloat16);
      EXPECT_EQ(parameters["scale"].grad().scalar_type(), torch::kDouble);
      const double norm = std::sqrt(4 * 1 + 15 * 4 + 2 * 16);
      EXPECT_NEAR(net.clip_grad_norm_(norm / 2), norm, 1e-6 * norm);
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(all_close(
            gradient.to(torch::kDouble),
            torch::full_like(gradient, expected.at(name) / 2)
                .to(torch::kDouble),
            1e-6,
            0));
      }
    });
  }
}

} // namespace shapes
} // namespace fsdp::testing
