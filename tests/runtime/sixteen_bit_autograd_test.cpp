// Unusual ways through autograd with weights in bfloat16, against a reference
// in float32: whatever is wrong by more than rounding shows.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::sixteen_bit {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::grad;
using torch::autograd::tensor_list;

constexpr double kRounding = 5e-2;

ParitySettings settings_with(Batch batch) {
  ParitySettings settings;
  settings.batch = batch;
  settings.loss_tolerance = kRounding;
  settings.parameter_tolerance = kRounding;
  settings.world_sizes = {1, 2, 3};
  settings.options.mixed_precision(
      {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat});
  return settings;
}

template <class F>
void expect_same(F body, Batch batch = Batch::kSplit) {
  expect_same_program(
      program_with([body](TanhLayers& m, Trial& run) {
        body(m, run);
        for (const auto& parameter : run.parameters()) {
          EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
          if (parameter.grad().defined()) {
            EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
          }
        }
      }),
      settings_with(batch));
}

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

TEST(SixteenBitAutograd, GradOutsideAndInsideOfARegion) {
  expect_same([](TanhLayers& m, Trial& run) {
    for (const auto& each : grad({loss_in_region(m, run)}, run.parameters())) {
      if (run.sharded()) {
        EXPECT_EQ(each.scalar_type(), torch::kBFloat16);
      }
      run.record_mean("grad outside", each.to(torch::kFloat));
    }
    std::vector<Tensor> grads;
    run.forward([&] { grads = grad({m.loss(run.rows())}, run.parameters()); });
    for (const auto& each : grads) {
      run.record_mean("grad inside", each.to(torch::kFloat));
    }
  });
}

TEST(SixteenBitAutograd, BackwardWithInputs) {
  expect_same([](TanhLayers& m, Trial& run) {
    loss_in_region(m, run).backward(
        {}, false, false, std::vector<Tensor>{m.weight(0), m.weight(3)});
    run.record_gradients("of the inputs");
  });
}

TEST(SixteenBitAutograd, SeveralForwardsAndSeveralBackwards) {
  expect_same([](TanhLayers& m, Trial& run) {
    const auto first = loss_in_region(m, run);
    const auto second =
        run.forward([&] { return m.forward(2 * m.input(run.rows())).mean(); });
    (first + second.to(first.scalar_type())).backward({}, true);
    run.record_gradients("of the sum");
    (first + second.to(first.scalar_type())).backward();
    run.forward([&] { m.loss(run.rows()).backward(); });
    run.record_gradients("of three passes");
  });
}

/// A linear layer that saves its weight, and a view of it in saved_data.
struct SavedLinear : Function<SavedLinear> {
  static Tensor
  forward(AutogradContext* context, Tensor x, Tensor weight, Tensor bias) {
    context->save_for_backward({x, weight});
    context->saved_data["transposed"] = weight.t();
    return at::addmm(bias, x, weight.t());
  }
  static tensor_list backward(AutogradContext* context, tensor_list grads) {
    const auto saved = context->get_saved_variables();
    const auto transposed = context->saved_data["transposed"].toTensor();
    const auto& gradient = grads[0];
    const auto half =
        0.5 * (gradient.mm(saved[1]) + gradient.mm(transposed.t()));
    return {
        half,
        gradient.t().mm(saved[0].to(gradient.scalar_type())),
        gradient.sum(0)};
  }
};

TEST(SixteenBitAutograd, CustomFunction) {
  expect_same([](TanhLayers& m, Trial& run) {
    run.forward([&] {
         auto y = m.input(run.rows());
         for (auto& layer : m.layers) {
           y = torch::tanh(SavedLinear::apply(y, layer->weight, layer->bias));
         }
         return y.pow(2).mean();
       })
        .backward();
    run.record_gradients("of a custom function");
  });
}

TEST(SixteenBitAutograd, InnerStepThatIsLearnedThrough) {
  expect_same(
      [](TanhLayers& m, Trial& run) {
        run.forward([&] {
             const auto loss_with = [&](const std::vector<Tensor>& weights) {
               auto y = m.input(run.rows());
               for (const auto& weight : weights) {
                 y = torch::tanh(y.to(weight.scalar_type()).mm(weight));
               }
               return y.pow(2).mean();
             };
             std::vector<Tensor> weights = {m.weight(0), m.weight(1)};
             const auto grads =
                 grad({loss_with(weights)}, weights, {}, true, true);
             for (size_t i = 0; i < weights.size(); ++i) {
               weights[i] = weights[i] - 0.1 * grads[i];
             }
             return loss_with(weights);
           })
            .backward();
        run.record_gradients("through an inner step");
      },
      Batch::kSame);
}

TEST(SixteenBitAutograd, HooksOfParametersAndActivations) {
  expect_same([](TanhLayers& m, Trial& run) {
    for (auto& layer : m.layers) {
      layer->weight.register_hook(
          [](const Tensor& gradient) { return gradient * 2; });
    }
    run.forward([&] {
         auto y = m.input(run.rows());
         for (size_t i = 0; i < 4; ++i) {
           y = torch::tanh(m.layers[i](y));
           const auto weight = m.weight((i + 2) % 4);
           y.register_hook([weight](const Tensor& gradient) {
             const torch::NoGradGuard no_grad;
             return gradient + 0.01 * gradient.mm(weight.t());
           });
         }
         return y.pow(2).mean();
       })
        .backward();
    run.record_gradients("with hooks");
  });
}

TEST(SixteenBitAutograd, WritesReachTheWeightsAtRest) {
  expect_same([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      run.forward([&] {
           m.weight(1).data().mul_(0.5);
           const torch::NoGradGuard no_grad;
           m.layers[2]->bias.add_(0.25);
           const torch::AutoGradMode grad_mode(true);
           return m.loss(run.rows());
         })
          .backward();
      run.record_gradients("with the new values");
      run.step();
    }
    if (run.sharded()) { // what is computed with has 16 bits
      run.forward(
          [&] { EXPECT_EQ(m.weight(1).scalar_type(), torch::kBFloat16); });
    }
    run.record_parameters("at the end");
  });
}

TEST(SixteenBitAutograd, EvaluationBetweenForwardAndBackward) {
  expect_same([](TanhLayers& m, Trial& run) {
    const auto loss = loss_in_region(m, run);
    {
      const c10::InferenceMode inference;
      run.record_mean("evaluation", loss_in_region(m, run).to(torch::kFloat));
    }
    loss.backward();
    run.record_gradients("after all");
  });
}

} // namespace
} // namespace fsdp::testing::sixteen_bit
