// Our optimizers take every parameter that libtorch's take.

#include "train/training.h"

#include <functional>

namespace fsdp::testing {
namespace parameter_kinds {

namespace optim = torch::optim;
using at::Tensor;
using MakeValue = std::function<Tensor()>;

/// A leaf with the values of make(), and a gradient for each step.
Tensor leaf_of(const MakeValue& make) {
  return make().detach().requires_grad_();
}

template <class Optimizer, class Options>
Tensor trained(
    const MakeValue& make,
    const std::function<Tensor(int step)>& gradient,
    const Options& options) {
  const auto value = leaf_of(make);
  Optimizer optimizer({value}, options);
  for (int step = 0; step < 3; ++step) {
    value.mutable_grad() = gradient(step);
    optimizer.step();
  }
  return value.detach();
}

/// As if trained by libtorch: Adam, AdamW and SGD.
void expect_same_as_libtorch(
    const MakeValue& make,
    const std::function<Tensor(int step)>& gradient,
    double tolerance = 1e-6) {
  const auto adamw = optim::AdamWOptions(0.01).eps(1e-3).amsgrad(true);
  EXPECT_TRUE(all_close(
      trained<AdamW>(make, gradient, adamw),
      trained<optim::AdamW>(make, gradient, adamw),
      tolerance,
      1e-8));
  const auto adam = optim::AdamOptions(0.01).eps(1e-3).weight_decay(0.1);
  EXPECT_TRUE(all_close(
      trained<Adam>(make, gradient, adam),
      trained<optim::Adam>(make, gradient, adam),
      tolerance,
      1e-8));
  const auto sgd = optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
  EXPECT_TRUE(all_close(
      trained<SGD>(make, gradient, sgd),
      trained<optim::SGD>(make, gradient, sgd),
      tolerance,
      1e-8));
}

std::function<Tensor(int)> waves(
    std::vector<int64_t> sizes,
    at::ScalarType type = torch::kFloat) {
  return [=](int step) { return wave(sizes, 1.3 + step).to(type); };
}

TEST(OptimizerParameters, OrdinaryTensorsOfAllSizes) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {}, {0}, {1}, {63}, {64}, {65}, {3, 0, 2}, {7, 9, 11}, {40000}}) {
    expect_same_as_libtorch([&] { return wave(sizes); }, waves(sizes));
  }
}

TEST(OptimizerParameters, ChannelsLastWithAContiguousGradient) {
  expect_same_as_libtorch(
      [] {
        return wave({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
      },
      waves({2, 3, 4, 5}));
}

TEST(OptimizerParameters, ATransposedGradient) {
  expect_same_as_libtorch(
      [] {
        return wave({9, 10});
      },
      [](int step) {
        return wave({10, 9}, 1.3 + step).t();
      });
}

TEST(OptimizerParameters, AnExpandedGradient) {
  expect_same_as_libtorch(
      [] {
        return wave({9, 10});
      },
      [](int step) {
        return wave({1, 10}, 1.3 + step).expand({9, 10});
      });
}

TEST(OptimizerParameters, OneWithGapsInMemory) {
  expect_same_as_libtorch(
      [] {
        return wave({8, 20}).slice(1, 3, 14);
      },
      waves({8, 11}));
}

TEST(OptimizerParameters, TypesOtherThanFloat32) {
  expect_same_as_libtorch(
      [] { return wave({70}).to(torch::kDouble); },
      waves({70}, torch::kDouble),
      1e-14);
  // One step rounds once and the other several times.
  expect_same_as_libtorch(
      [] { return wave({70}).to(torch::kBFloat16); },
      waves({70}, torch::kBFloat16),
      0.016);
  expect_same_as_libtorch(
      [] { return wave({70}).to(torch::kHalf); },
      waves({70}, torch::kHalf),
      0.002);
}

TEST(OptimizerParameters, ComplexOnesArePairsOfRealOnes) {
  const auto make = [] { return wave({70, 2}); };
  const auto options = optim::AdamWOptions(0.01).weight_decay(0.1);
  const auto complex = trained<AdamW>(
      [&] { return torch::view_as_complex(make()); },
      [](int step) {
        return torch::view_as_complex(wave({70, 2}, 1.3 + step));
      },
      options);
  const auto real = trained<AdamW>(make, waves({70, 2}), options);
  EXPECT_TRUE(at::equal(torch::view_as_real(complex), real));
}

TEST(OptimizerParameters, AConjugateGradientIsResolved) {
  const auto gradient = [](int step) {
    return torch::view_as_complex(wave({70, 2}, 1.3 + step)).conj();
  };
  const auto make = [] { return torch::view_as_complex(wave({70, 2})); };
  const auto options = optim::SGDOptions(0.1).momentum(0.9);
  EXPECT_TRUE(all_close(
      torch::view_as_real(trained<SGD>(make, gradient, options)),
      torch::view_as_real(trained<optim::SGD>(make, gradient, options)),
      1e-6,
      1e-8));
}

/// Module::parameters() lists a tied parameter under each of its names.
TEST(OptimizerParameters, OneThatIsListedTwiceIsUpdatedTwice) {
  const auto train = [](auto make_optimizer) {
    const auto value = leaf_of([] { return wave({70}); });
    const auto other = leaf_of([] { return wave({3}); });
    const auto optimizer = make_optimizer({value, other, value});
    for (int step = 0; step < 3; ++step) {
      value.mutable_grad() = wave({70}, 1.3 + step);
      other.mutable_grad() = wave({3}, 1.3 + step);
      optimizer->step();
    }
    return value.detach();
  };
  using Leaves = std::vector<Tensor>;
  const auto adam = optim::AdamOptions(0.1).eps(1e-3);
  EXPECT_TRUE(all_close(
      train([&](const Leaves& leaves) {
        return std::make_unique<Adam>(leaves, adam);
      }),
      train([&](const Leaves& leaves) {
        return std::make_unique<optim::Adam>(leaves, adam);
      }),
      1e-6,
      1e-8));
  const auto sgd = optim::SGDOptions(0.1).momentum(0.9).dampening(0.5);
  EXPECT_TRUE(all_close(
      train([&](const Leaves& leaves) {
        return std::make_unique<SGD>(leaves, sgd);
      }),
      train([&](const Leaves& leaves) {
        return std::make_unique<optim::SGD>(leaves, sgd);
      }),
      1e-6,
      1e-8));
}

TEST(OptimizerParameters, WithoutAGradientTheyAndTheirStepsStay) {
  const auto used = leaf_of([] { return wave({5}); });
  const auto unused = leaf_of([] { return wave({5}); });
  AdamW optimizer({used, unused}, optim::AdamWOptions(0.1).weight_decay(0.5));
  used.mutable_grad() = wave({5});
  optimizer.step();
  EXPECT_TRUE(at::equal(unused, wave({5})));
  EXPECT_FALSE(at::equal(used, wave({5})));
  EXPECT_EQ(optimizer.state().count(unused.unsafeGetTensorImpl()), 0U);
  unused.mutable_grad() = wave({5});
  optimizer.step();
  const auto steps = [&](const Tensor& parameter) {
    return static_cast<const optim::AdamWParamState&>(
               *optimizer.state().at(parameter.unsafeGetTensorImpl()))
        .step();
  };
  EXPECT_EQ(steps(used), 2);
  EXPECT_EQ(steps(unused), 1);
}

TEST(OptimizerParameters, InferenceTensorsAreUpdatedInInferenceMode) {
  const c10::InferenceMode guard;
  const auto value = wave({70});
  value.mutable_grad() = wave({70}, 1.3);
  SGD optimizer({value}, optim::SGDOptions(0.1));
  optimizer.step();
  EXPECT_TRUE(all_close(value, wave({70}) - 0.1 * wave({70}, 1.3), 1e-6, 1e-8));
}

TEST(OptimizerParameters, FrozenAndThawedInTheMiddle) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        const auto optimizer = optimizer_for<optim::AdamW, AdamW>(
            net,
            net.parameters(),
            optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.1));
        for (int step = 0; step < 6; ++step) {
          const bool frozen = step == 1 || step == 2 || step == 4;
          net->input->weight.requires_grad_(!frozen);
          net->norm->bias.requires_grad_(step > 2);
          train_step(net, log, step);
          optimizer->step();
          optimizer->zero_grad();
          log.parameters(net);
        }
      },
      settings);
}

/// t0 to t5, of three types in turns.
std::vector<Tensor> mixed_values() {
  const auto types = {torch::kFloat, torch::kBFloat16, torch::kDouble};
  std::vector<Tensor> values;
  for (const double seed : {0.0, 1.0}) {
    for (const auto type : types) {
      values.push_back(
          leaf_of([&] { return wave({90}, 0.7 + seed).to(type); }));
    }
  }
  return values;
}

TEST(OptimizerParameters, UnitsOfSeveralTypes) {
  const auto options = optim::AdamWOptions(0.01).eps(1e-3).weight_decay(0.1);
  const auto loss_of = [](const std::vector<Tensor>& values) {
    auto sum = torch::zeros({}, torch::kDouble);
    for (const auto& value : values) {
      sum = sum + value.to(torch::kDouble).pow(2).sum();
    }
    return sum;
  };
  const auto plain = mixed_values();
  AdamW expected(plain, options);
  for (int step = 0; step < 3; ++step) {
    loss_of(plain).backward();
    expected.step();
    expected.zero_grad();
  }
  for (const int size : {1, 2, 4}) { // the mean of equal numbers is exact
    on_ranks(size, [&](const World& world) {
      const auto values = mixed_values();
      ShardedTensors net(one_unit_of(values), world);
      AdamW optimizer(net.parameters(), options);
      for (int step = 0; step < 3; ++step) {
        net.call([&] { return loss_of(values); }).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto whole = whole_values(net);
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(at::equal(whole[i].second, plain[i])) << i;
      }
    });
  }
}

TEST(OptimizerParameters, IgnoredOnesAreUpdatedToo) {
  ProgramSettings settings;
  settings.options.units(each<Block>()).ignore({"norm", "head.bias"});
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        const auto optimizer = optimizer_for<optim::SGD, SGD>(
            net, net.parameters(), optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          train_step(net, log, step);
          net.average_ignored_gradients();
          optimizer->step();
          optimizer->zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

} // namespace parameter_kinds
} // namespace fsdp::testing
