// Custom autograd functions, and code that reads weights without operators.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::custom_function {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::tensor_list;

/// A linear layer that saves its weight.
struct SavedLinear : Function<SavedLinear> {
  static Tensor
  forward(AutogradContext* context, Tensor x, Tensor weight, Tensor bias) {
    context->save_for_backward({x, weight});
    return at::addmm(bias, x, weight.t());
  }
  static tensor_list backward(AutogradContext* context, tensor_list grads) {
    const auto saved = context->get_saved_variables();
    const auto& grad = grads[0];
    return {grad.mm(saved[1]), grad.t().mm(saved[0]), grad.sum(0)};
  }
};

/// The same, but the weight and a view of it stay in saved_data.
struct DataLinear : Function<DataLinear> {
  static Tensor
  forward(AutogradContext* context, Tensor x, Tensor weight, Tensor bias) {
    context->saved_data["x"] = x;
    context->saved_data["weight"] = weight;
    context->saved_data["transposed"] = weight.t();
    return at::addmm(bias, x, weight.t());
  }
  static tensor_list backward(AutogradContext* context, tensor_list grads) {
    const auto x = context->saved_data["x"].toTensor();
    const auto weight = context->saved_data["weight"].toTensor();
    const auto transposed = context->saved_data["transposed"].toTensor();
    const auto& grad = grads[0];
    const auto half = 0.5 * (grad.mm(transposed.t()) + grad.mm(weight));
    return {half, grad.t().mm(x), grad.sum(0)};
  }
};

/// Which memory a function reads without an operator.
enum class Raw : uint8_t { kNothing, kForward, kBackward };
enum class Guard : uint8_t { kNone, kTouch };

/// Scales columns with a loop over raw memory.
struct RawScale : Function<RawScale> {
  static Tensor scaled(const Tensor& x, const Tensor& scale) {
    const auto input = x.contiguous();
    auto result = at::empty_like(input);
    const auto* in = input.const_data_ptr<float>();
    const auto* by = scale.const_data_ptr<float>();
    auto* out = result.mutable_data_ptr<float>();
    for (int64_t i = 0; i < input.numel(); ++i) {
      out[i] = in[i] * by[i % x.size(1)];
    }
    return result;
  }
  static Tensor
  product(const Tensor& x, const Tensor& scale, bool raw, bool touched) {
    if (!raw) {
      return x * scale;
    }
    if (!touched) {
      return scaled(x, scale);
    }
    const auto touch = fsdp::touch(scale);
    return scaled(x, scale);
  }
  static Tensor forward(
      AutogradContext* context,
      Tensor x,
      Tensor scale,
      int64_t raw,
      int64_t guard) {
    context->save_for_backward({x, scale});
    context->saved_data["raw"] = raw;
    context->saved_data["guard"] = guard;
    return product(
        x,
        scale,
        raw == static_cast<int64_t>(Raw::kForward),
        guard == static_cast<int64_t>(Guard::kTouch));
  }
  static tensor_list backward(AutogradContext* context, tensor_list grads) {
    const auto saved = context->get_saved_variables();
    const auto raw = context->saved_data["raw"].toInt();
    const auto guard = context->saved_data["guard"].toInt();
    const auto grad_x = product(
        grads[0],
        saved[1],
        raw == static_cast<int64_t>(Raw::kBackward),
        guard == static_cast<int64_t>(Guard::kTouch));
    return {grad_x, (grads[0] * saved[0]).sum(0), Tensor(), Tensor()};
  }
};

/// Layers with a scale at the start, in a unit of its own, so that it has been
/// released when backward comes to it.
struct ScaledLayers : TanhLayers {
  Tensor scale = torch::rand({kWidth}).add(0.5).set_requires_grad(true);

  NamedUnits units() const {
    auto result = TanhLayers::units();
    result.push_back({"scale", {{"scale", scale}}});
    return result;
  }

  Tensor loss(const Tensor& rows, Raw raw, Guard guard) {
    // An input with a gradient, so that backward reads the scale.
    auto y = input(rows).set_requires_grad(true);
    y = RawScale::apply(
        y, scale, static_cast<int64_t>(raw), static_cast<int64_t>(guard));
    return forward(y).pow(2).mean();
  }
};

template <class F>
Tensor loss_of(TanhLayers& m, const Tensor& rows) {
  auto y = m.input(rows);
  for (auto& layer : m.layers) {
    y = torch::tanh(F::apply(y, layer->weight, layer->bias));
  }
  return y.pow(2).mean();
}

TEST(CustomFunction, SavesAWeightForBackward) {
  expect_same_training(model_with(loss_of<SavedLinear>));
}

TEST(CustomFunction, KeepsAWeightAndAViewInSavedData) {
  expect_same_training(model_with(loss_of<DataLinear>));
}

TEST(CustomFunction, WeightsCapturedByLambdas) {
  struct Captured : TanhLayers {
    std::vector<std::function<Tensor(const Tensor&)>> steps;
    Captured() {
      for (auto& layer : layers) {
        const auto weight = layer->weight;
        const auto bias = layer->bias;
        steps.emplace_back([weight, bias](const Tensor& y) {
          return torch::tanh(y.mm(weight.t()) + bias);
        });
      }
    }
  };
  expect_same_training(
      model_with<Captured>([](Captured& m, const Tensor& rows) {
        auto y = m.input(rows);
        for (const auto& step : m.steps) {
          y = step(y);
        }
        return y.pow(2).mean();
      }));
}

/// Rounds in forward, and passes the gradient on as it is.
struct StraightThrough : Function<StraightThrough> {
  static Tensor forward(AutogradContext* /*context*/, Tensor weight) {
    return (weight * 16).round() / 16;
  }
  static tensor_list backward(AutogradContext* /*c*/, tensor_list grads) {
    return grads;
  }
};

TEST(CustomFunction, QuantisedWeightsWithStraightThroughGradients) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.input(rows);
    for (auto& layer : m.layers) {
      y = torch::tanh(y.mm(StraightThrough::apply(layer->weight).t()));
    }
    return y.pow(2).mean();
  }));
}

/// Returns its input, a weight, as it is.
struct Same : Function<Same> {
  static Tensor forward(AutogradContext* /*context*/, Tensor weight) {
    return weight.view_as(weight);
  }
  static tensor_list backward(AutogradContext* /*c*/, tensor_list grads) {
    return {grads[0] * 2};
  }
};

TEST(CustomFunction, ReturnsAViewOfAWeight) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.input(rows);
    for (auto& layer : m.layers) {
      y = torch::tanh(
          torch::linear(y, Same::apply(layer->weight), layer->bias));
    }
    return y.pow(2).mean();
  }));
}

TEST(CustomFunction, RawMemoryIsRightUnderTouch) {
  for (const auto raw : {Raw::kForward, Raw::kBackward}) {
    expect_same_training(
        model_with<ScaledLayers>([raw](ScaledLayers& m, const Tensor& rows) {
          return m.loss(rows, raw, Guard::kTouch);
        }));
  }
}

std::string raw_error(ScaledLayers& m, ShardedTensors& net, Raw raw) {
  const auto rows = torch::arange(kRows);
  return error_of([&] {
    net.call([&] { return m.loss(rows, raw, Guard::kNone); }).backward();
  });
}

TEST(CustomFunction, RawMemoryOfAReleasedWeightIsRefusedAndTrainingGoesOn) {
  for (const auto raw : {Raw::kForward, Raw::kBackward}) {
    expect_same_program(
        program_with<ScaledLayers>([raw](ScaledLayers& m, Trial& run) {
          for (int step = 0; step < 3; ++step) {
            if (run.sharded()) {
              const auto text = raw_error(m, *run.net(), raw);
              EXPECT_PRED_FORMAT2(
                  ::testing::IsSubstring, "unit 'scale', rank ", text);
              EXPECT_PRED_FORMAT2(
                  ::testing::IsSubstring, "fsdp::touch(weight)", text);
              EXPECT_FALSE(m.scale.grad().defined());
            }
            auto loss = run.forward([&] {
              return m.loss(run.rows(), Raw::kNothing, Guard::kNone);
            });
            loss.backward();
            run.record_mean("loss", loss);
            run.record_gradients("after backward");
            run.step();
          }
          run.record_parameters("at the end");
        }),
        {.strategies = {Strategy::kFullShard}});
  }
}

TEST(CustomFunction, EveryWayToTheMemoryOfAReleasedWeightIsRefused) {
  in_worlds({1, 2}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    const auto weight = m->weight(1);
    const auto region = net.region();
    const std::vector<std::function<void()>> ways = {
        [&] { weight.data_ptr<float>(); },
        [&] { weight.data_ptr(); },
        [&] { weight.const_data_ptr(); },
        [&] { weight.mutable_data_ptr<float>(); },
        [&] { weight.accessor<float, 2>(); },
        [&] { weight.t().const_data_ptr<float>(); },
        [&] { weight.storage().data(); }};
    for (size_t i = 0; i < ways.size(); ++i) {
      EXPECT_PRED_FORMAT2(
          ::testing::IsSubstring, "unit 'layer1', rank ", error_of(ways[i]))
          << "way " << i;
    }
  });
}

TEST(CustomFunction, TouchedMemoryStaysWhileOtherUnitsAreRead) {
  in_worlds({1, 2, 3}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto weight = m->weight(1);
    const auto expected = weight.detach().clone();
    ShardedTensors net(
        m->units(), world, Options().strategy(strategy).slots(1));
    const auto region = net.region();
    const torch::NoGradGuard no_grad;
    const auto touch = fsdp::touch(weight);
    const auto* values = weight.const_data_ptr<float>();
    m->loss(torch::arange(kRows)); // reads all units
    EXPECT_TRUE(at::equal(
        expected,
        torch::from_blob(const_cast<float*>(values), expected.sizes())));
  });
}

TEST(CustomFunction, TouchOutsideOfARegionIsRefused) {
  in_worlds({1, 2}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    const auto weight = m->weight(1);
    Tensor view;
    net.call([&] { view = weight.t(); });
    EXPECT_PRED_FORMAT2(
        ::testing::IsSubstring, "outside of a region", error_of([&] {
          const auto touch = fsdp::touch(view);
        }));
    // A shard, or a tensor of the program, needs none.
    EXPECT_EQ(error_of([&] { const auto touch = fsdp::touch(weight); }), "");
    EXPECT_EQ(
        error_of([&] { const auto touch = fsdp::touch(torch::ones({2})); }),
        "");
  });
}

} // namespace
} // namespace fsdp::testing::custom_function
