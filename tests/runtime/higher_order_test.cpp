// Gradients of gradients.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::higher_order {
namespace {

using at::Tensor;
using torch::autograd::grad;

std::vector<Tensor> parameters_of(const TanhLayers& m) {
  std::vector<Tensor> parameters;
  for (const auto& layer : m.layers) {
    parameters.insert(parameters.end(), {layer->weight, layer->bias});
  }
  return parameters;
}

Tensor loss_with(const std::vector<Tensor>& weights, Tensor y) {
  for (size_t i = 0; i < weights.size(); i += 2) {
    y = torch::tanh(torch::linear(y, weights[i], weights[i + 1]));
  }
  return y.pow(2).mean();
}

/// Products of gradients are no mean over rows.
const ParitySettings kSameRows = {.batch = Batch::kSame};

TEST(HigherOrder, InnerStepsThatAreLearnedThrough) {
  for (const int inner_steps : {1, 3}) {
    expect_same_training(
        model_with([inner_steps](TanhLayers& m, const Tensor& rows) {
          auto weights = parameters_of(m);
          const auto x = m.input(rows);
          for (int i = 0; i < inner_steps; ++i) {
            const auto grads =
                grad({loss_with(weights, x)}, weights, {}, true, true);
            for (size_t k = 0; k < weights.size(); ++k) {
              weights[k] = weights[k] - 0.1 * grads[k];
            }
          }
          return loss_with(weights, x);
        }),
        kSameRows);
  }
}

TEST(HigherOrder, InnerStepOutsideOfARegion) {
  // Gradients that autograd::grad returns are whole, so this needs no region.
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) {
        for (int step = 0; step < 3; ++step) {
          const auto loss = run.forward([&] { return m.loss(run.rows()); });
          const auto grads = grad({loss}, run.parameters(), {}, true, true);
          auto norm = torch::zeros({});
          for (const auto& each : grads) {
            norm = norm + each.pow(2).sum();
          }
          (loss + norm.sqrt()).backward();
          run.record("norm", norm);
          run.record_gradients("of the loss and the norm");
          run.step();
        }
      }),
      kSameRows);
}

TEST(HigherOrder, PenaltyOnTheGradientOfTheInput) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    const auto x = m.input(rows).set_requires_grad(true);
    const auto y = m.forward(x);
    const auto of_x = grad({y.sum()}, {x}, {}, true, true)[0];
    return y.pow(2).mean() + 0.1 * of_x.pow(2).sum(1).mean();
  }));
}

TEST(HigherOrder, PenaltyWithItsOwnBackwardInsideTheRegion) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    const auto x = m.input(rows).set_requires_grad(true);
    const auto y = m.forward(x);
    const auto of_x = grad({y.sum()}, {x}, {}, true, true)[0];
    (0.1 * of_x.pow(2).sum(1).mean()).backward({}, true);
    return y.pow(2).mean();
  }));
}

TEST(HigherOrder, PenaltyOnTheGradientOfWeights) {
  expect_same_training(
      model_with([](TanhLayers& m, const Tensor& rows) {
        const auto loss = m.loss(rows);
        const auto grads =
            grad({loss}, {m.weight(0), m.weight(2)}, {}, true, true);
        return loss + grads[0].pow(2).sum() + grads[1].abs().sum();
      }),
      kSameRows);
}

/// The product of the Hessian of the loss with the parameters.
std::vector<Tensor> curvature(TanhLayers& m, const Tensor& rows) {
  const auto parameters = parameters_of(m);
  const auto grads = grad({m.loss(rows)}, parameters, {}, true, true);
  auto product = torch::zeros({});
  for (size_t i = 0; i < parameters.size(); ++i) {
    product = product + (grads[i] * parameters[i]).sum();
  }
  return grad({product}, parameters);
}

TEST(HigherOrder, HessianVectorProductInARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      // The product is local; what is linear in the loss averages.
      const auto products =
          run.forward([&] { return curvature(m, run.rows()); });
      for (const auto& product : products) {
        run.record_mean("product", product);
      }
      run.forward([&] { return m.loss(run.rows()); }).backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
  }));
}

TEST(HigherOrder, HessianVectorProductOutsideOfARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      const auto loss = run.forward([&] { return m.loss(run.rows()); });
      const auto grads = grad({loss}, run.parameters(), {}, true, true);
      auto product = torch::zeros({});
      for (const auto& each : grads) {
        product = product + (each * torch::ones_like(each)).sum();
      }
      for (const auto& each : grad({product}, run.parameters())) {
        run.record_mean("product", each);
      }
      run.forward([&] { return m.loss(run.rows()); }).backward();
      run.step();
    }
  }));
}

TEST(HigherOrder, ThirdOrder) {
  expect_same_training(
      model_with([](TanhLayers& m, const Tensor& rows) {
        const auto x = m.input(rows).set_requires_grad(true);
        const auto y = m.forward(x).sum();
        const auto first = grad({y}, {x}, {}, true, true)[0];
        const auto second = grad({first.pow(2).sum()}, {x}, {}, true, true)[0];
        return second.pow(2).mean() + y.pow(2) * 1e-3;
      }),
      kSameRows);
}

TEST(HigherOrder, JacobianRowByRow) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    const auto rows = run.rows();
    const auto y =
        run.forward([&] { return m.forward(m.input(rows)).mean(0); });
    for (int64_t i = 0; i < 3; ++i) {
      const auto row = grad(
          {y}, {m.weight(1), m.layers[3]->bias}, {torch::eye(15)[i]}, true);
      run.record_mean("row", row[0]);
      run.record_mean("row", row[1]);
    }
    y.sum().backward();
    run.record_gradients("of the sum");
  }));
}

} // namespace
} // namespace fsdp::testing::higher_order
