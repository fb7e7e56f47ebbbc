// Hooks of the program on parameters, activations, losses and graph nodes.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::testing::hooks {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

/// Gradients of each rank pass the hooks before they are averaged, so hooks
/// that are not linear need the same rows on all ranks.
const ParitySettings kSameRows = {.batch = Batch::kSame};

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

void train(TanhLayers& m, Trial& run, int steps = 3) {
  for (int step = 0; step < steps; ++step) {
    loss_in_region(m, run).backward();
    run.record_gradients("of step " + std::to_string(step));
    run.step();
  }
  run.record_parameters("at the end");
}

struct HookedBefore : TanhLayers {
  int64_t dims = 0;
  HookedBefore() {
    for (auto& layer : layers) {
      layer->weight.register_hook([this](const Tensor& gradient) {
        dims += gradient.dim();
        return gradient * 2;
      });
      layer->weight.register_hook(
          [](const Tensor& gradient) { return gradient.clamp(-1e-3, 1e-3); });
    }
  }
};

TEST(Hooks, OfParametersFromBeforeSharding) {
  expect_same_program(
      program_with<HookedBefore>([](HookedBefore& m, Trial& run) {
        train(m, run);
        run.record("dimensions that hooks saw", static_cast<double>(m.dims));
      }),
      kSameRows);
}

TEST(Hooks, OfParametersFromAfterSharding) {
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) {
        int64_t dims = 0;
        std::vector<unsigned> handles;
        for (auto& layer : m.layers) {
          handles.push_back(
              layer->weight.register_hook([&](const Tensor& gradient) {
                dims += gradient.dim();
                return gradient.clamp(-1e-3, 1e-3);
              }));
          layer->bias.register_hook(
              [](const Tensor& gradient) { return gradient * 0.5; });
        }
        train(m, run);
        m.weight(1).remove_hook(handles[1]);
        train(m, run);
        run.record("dimensions that hooks saw", static_cast<double>(dims));
      }),
      kSameRows);
}

TEST(Hooks, OfActivationsThatReadOtherWeights) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.input(rows);
    for (size_t i = 0; i < 4; ++i) {
      y = torch::tanh(m.layers[i](y));
      const auto weight = m.weight((i + 2) % 4);
      y.register_hook([weight](const Tensor& gradient) {
        const torch::NoGradGuard no_grad;
        return gradient + 0.01 * gradient.mm(weight.t());
      });
    }
    return y.pow(2).mean();
  }));
}

TEST(Hooks, OfALossMadeOutsideOfARegionReadWeights) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto y =
          run.forward([&] { return m.forward(m.input(run.rows())); });
      const auto loss = (y * 2).pow(2).mean();
      loss.register_hook([&](const Tensor& gradient) {
        const torch::NoGradGuard no_grad;
        return gradient * m.weight(2).sum() * m.weight(2).size(0);
      });
      loss.backward();
      run.record_gradients("scaled by a weight");
      run.step();
    }
  }));
}

TEST(Hooks, OfViewsOfWeights) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.input(rows);
    for (auto& layer : m.layers) {
      auto transposed = layer->weight.t();
      transposed.register_hook(
          [](const Tensor& gradient) { return gradient * 0.5; });
      y = torch::tanh(y.mm(transposed) + layer->bias);
    }
    return y.pow(2).mean();
  }));
}

TEST(Hooks, RetainedGradientsOfActivations) {
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) {
        for (int step = 0; step < 2; ++step) {
          Tensor y;
          auto loss = run.forward([&] {
            y = torch::tanh(m.layers[0](m.input(run.rows())));
            y.retain_grad();
            return m.forward(y).pow(2).sum();
          });
          loss.backward();
          run.record("gradient of an activation", y.grad());
          run.step(0.01);
        }
      }),
      kSameRows);
}

TEST(Hooks, ThatRunAnotherBackward) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.forward(m.input(rows));
    y.register_hook([&m, rows](const Tensor& gradient) {
      const torch::AutoGradMode grad_mode(true);
      m.forward(2 * m.input(rows)).pow(2).mean().backward();
      return gradient;
    });
    return y.pow(2).mean();
  }));
}

TEST(Hooks, ThatAskForGradientsOfOtherLosses) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.forward(m.input(rows));
    y.register_hook([&m, rows](const Tensor& gradient) {
      const torch::AutoGradMode grad_mode(true);
      const auto x = m.input(rows).set_requires_grad(true);
      const auto of_x =
          torch::autograd::grad({m.layers[1](x).pow(2).mean()}, {x})[0];
      return gradient + 0.1 * of_x;
    });
    return y.pow(2).mean();
  }));
}

/// Reads a weight before a node of the graph runs.
struct ReadingPreHook : torch::autograd::FunctionPreHook {
  explicit ReadingPreHook(Tensor weight_to_read)
      : weight(std::move(weight_to_read)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const torch::NoGradGuard no_grad;
    return {gradients[0] * weight.abs().sum()};
  }
  Tensor weight;
};

TEST(Hooks, OfGraphNodes) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = torch::tanh(m.layers[0](m.input(rows)));
    y.grad_fn()->add_pre_hook(std::make_unique<ReadingPreHook>(m.weight(2)));
    return m.forward(y).pow(2).mean();
  }));
}

/// Runs a function when the gradient of a parameter is there.
struct WhenThere : torch::autograd::PostAccumulateGradHook {
  explicit WhenThere(std::function<void(const Tensor&)> call_back)
      : call(std::move(call_back)) {}
  void operator()(const Tensor& variable) override { call(variable); }
  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  std::function<void(const Tensor&)> call;
};

void set_hook(
    const Tensor& parameter,
    std::function<void(const Tensor&)> call) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<WhenThere>(std::move(call)));
}

/// The optimizer runs as soon as a gradient is there, and frees it.
void step_and_free(const Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
  parameter.sub_(parameter.grad(), 0.1);
  parameter.mutable_grad().reset();
}

struct StepsBySelf : TanhLayers {
  StepsBySelf() {
    for (auto& layer : layers) {
      set_hook(layer->weight, step_and_free);
      set_hook(layer->bias, step_and_free);
    }
  }
};

TEST(Hooks, AfterAccumulationFromBeforeSharding) {
  expect_same_program(program_with<StepsBySelf>([](StepsBySelf& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto loss = loss_in_region(m, run);
      loss.backward();
      run.record_mean("loss", loss);
      run.record_gradients("that the hooks freed");
    }
    run.record_parameters("at the end");
  }));
}

TEST(Hooks, AfterAccumulationFromAfterSharding) {
  for (const bool between : {false, true}) {
    expect_same_program(program_with([between](TanhLayers& m, Trial& run) {
      int calls = 0;
      const auto set_all = [&] {
        for (auto& layer : m.layers) {
          set_hook(layer->weight, [&](const Tensor& parameter) {
            ++calls;
            step_and_free(parameter);
          });
        }
      };
      if (!between) {
        set_all();
      }
      for (int step = 0; step < 3; ++step) {
        const auto loss = loss_in_region(m, run);
        if (between && step == 1) {
          set_all(); // between forward and backward
        }
        loss.backward();
        run.record_mean("loss", loss);
        run.record_gradients("without those that hooks freed");
        run.step();
      }
      run.record("calls", calls);
      run.record_parameters("at the end");
    }));
  }
}

TEST(Hooks, AfterAccumulationSetInsideARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    int calls = 0;
    for (int step = 0; step < 2; ++step) {
      run.forward([&] {
        const auto loss = m.loss(run.rows());
        if (step == 0) {
          set_hook(m.weight(1), [&](const Tensor& /*parameter*/) { ++calls; });
        }
        loss.backward();
      });
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
    run.record("calls", calls);
  }));
}

TEST(Hooks, AnExceptionAfterAccumulationLeavesTheGradients) {
  // The pass is over when such a hook runs: it is this rank's affair alone.
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(s));
    bool throws = world.rank() == 0;
    set_hook(m->weight(1), [&](const Tensor& /*parameter*/) {
      if (std::exchange(throws, false)) {
        throw std::runtime_error("after the pass");
      }
    });
    const auto pass = [&] {
      net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    };
    EXPECT_EQ(error_of(pass), world.rank() == 0 ? "after the pass" : "");
    EXPECT_EQ(m->weight(0).sizes(), m->weight(0).grad().sizes());
    const auto once = m->weight(3).grad().clone();
    EXPECT_EQ(error_of(pass), "");
    EXPECT_TRUE(at::equal(m->weight(3).grad(), once + once));
  });
}

TEST(Hooks, EarlierGradientsAreSetAsideDuringBackwardAndAddedToAfterwards) {
  in_worlds({1, 2}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    const auto weight = m->weight(1);
    int found = 0;
    weight.register_hook([&](const Tensor& gradient) {
      EXPECT_EQ(gradient.dim(), 2);
      found += weight.grad().defined() ? 1 : 0;
    });
    const auto pass = [&] {
      net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    };
    pass();
    const auto gradient = weight.grad();
    const auto once = gradient.clone();
    pass();
    EXPECT_EQ(found, 0);
    EXPECT_TRUE(weight.grad().is_same(gradient));
    EXPECT_TRUE(at::equal(gradient, once + once));
  });
}

} // namespace
} // namespace fsdp::testing::hooks
