// Backward passes that run, and fail, inside of an open forward region.

#include "harness/parity.h"
#include "harness/tanh_layers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace inner_pass {
namespace {

using at::Tensor;

/// Gradients of one pass, as they are on this rank.
std::vector<Tensor> gradients_of(const ShardedTensors& net) {
  std::vector<Tensor> gradients;
  for (const auto& parameter : net.parameters()) {
    gradients.push_back(
        parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  }
  return gradients;
}

/// A loss whose backward has brought gradients of layers 3 and 2 when it
/// throws.
Tensor failing_loss(TanhLayers& model, const Tensor& rows) {
  auto y = model.input(rows);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    y = torch::tanh(model.layers[i]->forward(y));
    if (i == 1) {
      y.register_hook([](const Tensor&) -> Tensor {
        throw std::runtime_error("half way");
      });
    }
  }
  return y.pow(2).mean();
}

void expect_clean_after_a_caught_failure(const World& world) {
  const auto model = build_model();
  ShardedTensors net(model->units(), world);
  const auto rows = torch::arange(kRows);
  net.call([&] { return model->loss(rows); }).backward();
  const auto expected = gradients_of(net);
  for (auto& parameter : net.parameters()) {
    parameter.mutable_grad().reset();
  }
  net.call([&] {
    const auto text = error_of([&] { failing_loss(*model, rows).backward(); });
    EXPECT_NE(text.find("half way"), std::string::npos) << text;
    model->loss(rows).backward();
  });
  const auto actual = gradients_of(net);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "parameter " << i;
  }
  EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
}

TEST(InnerPass, ThatFailsAndIsCaughtLeavesNoGradients) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(
        world_size,
        expect_clean_after_a_caught_failure,
        std::chrono::seconds(20));
  }
}

TEST(InnerPass, ThatIsCaughtAndNotRepeatedLeavesNothingForTheNextStep) {
  run_ranks(
      2,
      [](const World& world) {
        const auto model = build_model();
        ShardedTensors net(model->units(), world);
        const auto rows = torch::arange(kRows);
        net.call([&] {
          EXPECT_NE(
              error_of([&] { failing_loss(*model, rows).backward(); }), "");
        });
        EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
        for (const auto& parameter : net.parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
      },
      std::chrono::seconds(20));
}

} // namespace
} // namespace inner_pass
} // namespace fsdp::testing
