// Optimizers that have taken steps before the model was sharded.

#include "train/training.h"

#include <functional>
#include <memory>

namespace fsdp::testing {
namespace adopting {

namespace optim = torch::optim;
using at::Tensor;
using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(
    const std::vector<Tensor>& parameters)>;

template <class N>
void train(N& net, optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    net(wave({kRows, 3}, 0.7 + step)).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

/// Three plain steps and three sharded ones are six plain ones.
void expect_goes_on(const MakeOptimizer& make) {
  const DefaultType type(torch::kDouble);
  Plain plain(seeded(make_network));
  const auto expected = make(plain.parameters());
  train(plain, *expected, 0, 6);
  const auto expected_values = values_of(plain);
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    for (const int size : {1, 2, 3, 4}) {
      on_ranks(size, [&](const World& world) {
        const auto module = seeded(make_network);
        const auto optimizer = make(module->parameters());
        Plain before(module);
        train(before, *optimizer, 0, 3);
        FullyShardedDataParallel net(
            module, world, Options().strategy(strategy).units(each<Block>()));
        net.adopt(*optimizer);
        train(net, *optimizer, 3, 6);
        const auto values = whole_values(net);
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_TRUE(all_close(
              values[i].second, expected_values[i].second, 1e-11, 1e-13))
              << values[i].first;
        }
      });
    }
  }
}

template <class T, class O>
MakeOptimizer making(const O& options) {
  return [options](const std::vector<Tensor>& parameters) {
    return std::make_unique<T>(parameters, options);
  };
}

TEST(Adopt, AdamW) {
  const auto options = optim::AdamWOptions(0.01).eps(1e-4).amsgrad(true);
  expect_goes_on(making<optim::AdamW>(options));
  expect_goes_on(making<AdamW>(options));
}

TEST(Adopt, Adam) {
  const auto options = optim::AdamOptions(0.01).eps(1e-4);
  expect_goes_on(making<optim::Adam>(options));
  expect_goes_on(making<Adam>(options));
}

TEST(Adopt, Sgd) {
  const auto options = optim::SGDOptions(0.1).momentum(0.9).dampening(0.3);
  expect_goes_on(making<optim::SGD>(options));
  expect_goes_on(making<SGD>(options));
}

TEST(Adopt, SgdWithoutState) {
  expect_goes_on(making<optim::SGD>(optim::SGDOptions(0.1)));
}

TEST(Adopt, RmsProp) {
  expect_goes_on(making<optim::RMSprop>(
      optim::RMSpropOptions(0.01).eps(1e-2).centered(true).momentum(0.5)));
}

TEST(Adopt, Adagrad) {
  expect_goes_on(making<optim::Adagrad>(
      optim::AdagradOptions(0.01).eps(1e-4).initial_accumulator_value(0.1)));
}

TEST(Adopt, AdagradBeforeItsFirstStep) {
  // It makes its state, of whole shapes, when it is built.
  on_ranks(3, [](const World& world) {
    const auto module = seeded(make_network);
    optim::Adagrad optimizer(module->parameters(), 0.01);
    FullyShardedDataParallel net(module, world);
    net.adopt(optimizer);
    Plain plain(seeded(make_network));
    optim::Adagrad expected(plain.parameters(), 0.01);
    train(net, optimizer, 0, 2);
    train(plain, expected, 0, 2);
    const auto expected_values = values_of(plain);
    const auto values = whole_values(net);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(
          all_close(values[i].second, expected_values[i].second, 1e-5, 1e-7));
    }
  });
}

Tensor& first_moment(optim::Optimizer& optimizer, const Tensor& parameter) {
  return static_cast<optim::AdamParamState&>(
             *optimizer.state().at(parameter.unsafeGetTensorImpl()))
      .exp_avg();
}

TEST(Adopt, WhatIsAShardAlreadyStays) {
  on_ranks(3, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    optim::Adam optimizer(net.parameters(), 0.01);
    train(net, optimizer, 0, 1);
    const auto parameter = net.parameters()[0];
    const auto before = first_moment(optimizer, parameter);
    net.adopt(optimizer);
    net.adopt(optimizer);
    EXPECT_TRUE(first_moment(optimizer, parameter).is_same(before));
  });
}

TEST(Adopt, StateOfOtherParametersStays) {
  on_ranks(2, [](const World& world) {
    const auto module = seeded(make_network);
    const auto foreign = wave({4, 4}).requires_grad_();
    auto parameters = module->parameters();
    parameters.push_back(foreign);
    optim::Adam optimizer(parameters, 0.01);
    foreign.mutable_grad() = wave({4, 4});
    module->forward(wave({4, 3})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto before = first_moment(optimizer, foreign);
    FullyShardedDataParallel net(
        module, world, Options().ignore({"head.weight"}));
    net.adopt(optimizer);
    EXPECT_TRUE(first_moment(optimizer, foreign).is_same(before));
    EXPECT_EQ(
        first_moment(optimizer, module->head->weight).sizes(),
        at::IntArrayRef({2, 5}));
    EXPECT_EQ(first_moment(optimizer, module->input->weight).dim(), 1);
  });
}

TEST(Adopt, WhatFitsNeitherIsToldAndNothingIsChanged) {
  on_ranks(2, [](const World& world) {
    const auto module = seeded(make_network);
    optim::Adam optimizer(module->parameters(), 0.01);
    module->forward(wave({4, 3})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    first_moment(optimizer, module->head->weight) = torch::zeros({3});
    FullyShardedDataParallel net(module, world);
    const auto error = error_of([&] { net.adopt(optimizer); });
    EXPECT_TRUE(contains(error, "'exp_avg' of parameter 'head.weight'"))
        << error;
    EXPECT_TRUE(contains(error, "rank " + std::to_string(world.rank()) + "/2"))
        << error;
    EXPECT_TRUE(contains(error, "expected shape [2, 5]")) << error;
    EXPECT_TRUE(contains(error, "got [3]")) << error;
    EXPECT_EQ(
        first_moment(optimizer, module->input->weight).sizes(),
        at::IntArrayRef({5, 3}));
  });
}

TEST(Adopt, LbfgsIsRefused) {
  FullyShardedDataParallel net(seeded(make_network));
  optim::LBFGS optimizer(net.parameters(), optim::LBFGSOptions(0.1));
  const auto error = error_of([&] { net.adopt(optimizer); });
  EXPECT_TRUE(contains(error, "LBFGS")) << error;
  EXPECT_TRUE(contains(error, "element-wise optimizer")) << error;
}

struct UnknownState : optim::OptimizerCloneableParamState<UnknownState> {};

TEST(Adopt, UnknownStateIsRefused) {
  FullyShardedDataParallel net(seeded(make_network));
  optim::SGD optimizer(net.parameters(), 0.1);
  optimizer.state()[net.parameters()[0].unsafeGetTensorImpl()] =
      std::make_unique<UnknownState>();
  const auto error = error_of([&] { net.adopt(optimizer); });
  EXPECT_TRUE(contains(error, "UnknownState")) << error;
}

} // namespace adopting
} // namespace fsdp::testing
