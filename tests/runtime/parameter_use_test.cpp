// Parameters that are used where they should not be.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::parameter_use {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

/// Takes two good steps and records them.
void train_on(TanhLayers& m, Trial& run) {
  for (int step = 0; step < 2; ++step) {
    loss_in_region(m, run).backward();
    run.record_gradients("after all");
    run.step();
  }
  run.record_parameters("at the end");
}

TEST(ParameterUse, AGraphFromBeforeTheOptimizerStepIsRefused) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    torch::optim::AdamW optimizer(
        run.parameters(), torch::optim::AdamWOptions(0.01).eps(1e-4));
    const auto loss = loss_in_region(m, run);
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    EXPECT_PRED_FORMAT2(
        IsSubstring, "modified by an inplace operation", error_of([&] {
          loss.backward();
        }));
    optimizer.zero_grad();
    train_on(m, run);
  }));
}

TEST(ParameterUse, AStepThatHidesItsWritesLeavesAnOldGraphUsable) {
  // torch::optim::SGD writes to .data(), which autograd does not see, so that
  // backward computes with the new values, without shards too.
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    torch::optim::SGD optimizer(run.parameters(), 0.1);
    const auto loss = loss_in_region(m, run);
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    optimizer.zero_grad();
    loss.backward();
    run.record_gradients("with new weights and old activations");
  }));
}

TEST(ParameterUse, AGraphFromBeforeAWriteInARegionIsRefused) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    const auto loss = run.forward([&] {
      auto inside = m.loss(run.rows());
      const torch::NoGradGuard no_grad;
      m.weight(1).add_(0.01);
      return inside;
    });
    EXPECT_PRED_FORMAT2(
        IsSubstring, "modified by an inplace operation", error_of([&] {
          loss.backward();
        }));
    for (const auto& parameter : run.parameters()) {
      parameter.mutable_grad().reset();
    }
    train_on(m, run);
  }));
}

/// Expects that `use`, outside of a region, is refused with all of `parts`.
template <class F>
void expect_refused(F use, const std::vector<std::string>& parts) {
  expect_same_program(
      program_with([=](TanhLayers& m, Trial& run) {
        auto y = run.forward([&] { return m.forward(m.input(run.rows())); });
        if (run.sharded()) {
          const auto text = error_of([&] { use(m, y); });
          for (const auto& part : parts) {
            EXPECT_PRED_FORMAT2(IsSubstring, part, text);
          }
        }
        train_on(m, run);
      }),
      {.strategies = kSharded});
}

TEST(ParameterUse, ARegulariserOutsideOfARegionIsRefused) {
  expect_refused(
      [](TanhLayers& m, const Tensor& y) {
        auto loss = y.pow(2).mean();
        for (auto& layer : m.layers) {
          loss = loss + 0.01 * layer->weight.pow(2).sum();
        }
      },
      {"aten::pow",
       "parameter 'layer0.weight'",
       "outside of a region",
       "shard of ",
       "rank ",
       "net.region()"});
}

TEST(ParameterUse, AProductWithAWeightOutsideOfARegionIsRefused) {
  expect_refused(
      [](TanhLayers& m, const Tensor& y) { y.mm(m.weight(2).t()); },
      {"parameter 'layer2.weight'", "outside of a region", "shard of "});
  expect_refused(
      [](TanhLayers& m, const Tensor& y) { y.matmul(m.weight(3)); },
      {"parameter 'layer3.weight'", "outside of a region", "shard of "});
  expect_refused(
      [](TanhLayers& m, const Tensor& y) { m.layers[1]->forward(y); },
      {"parameter 'layer1.weight'", "outside of a region", "net.call(...)"});
}

TEST(ParameterUse, ABiasThatWouldBroadcastOutsideOfARegionIsRefused) {
  expect_refused(
      [](TanhLayers& m, const Tensor& y) { y + m.layers[0]->bias; },
      {"aten::add", "parameter 'layer0.bias'", "outside of a region"});
}

TEST(ParameterUse, ANormOutsideOfARegionIsRefusedWithGradMode) {
  expect_refused(
      [](TanhLayers& m, const Tensor& /*y*/) { m.weight(1).norm(); },
      {"parameter 'layer1.weight'", "outside of a region"});
  expect_refused(
      [](TanhLayers& m, const Tensor& /*y*/) {
        torch::stack({m.weight(1), m.weight(2)});
      },
      {"aten::stack", "parameter 'layer1.weight'", "outside of a region"});
}

TEST(ParameterUse, AViewThatLeftItsRegionIsRefused) {
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) {
        Tensor transposed;
        Tensor column;
        auto y = run.forward([&] {
          transposed = m.weight(1).t();
          column = m.weight(2).select(1, 3);
          return m.forward(m.input(run.rows()));
        });
        if (run.sharded()) {
          for (const auto& use : std::vector<std::function<void()>>{
                   [&] { y.mm(transposed); },
                   [&] { transposed.sum().item<float>(); },
                   [&] { transposed.clone(); }}) {
            const auto text = error_of(use);
            EXPECT_PRED_FORMAT2(
                IsSubstring, "parameter 'layer1.weight', or a view", text);
            EXPECT_PRED_FORMAT2(IsSubstring, "outside of a region", text);
            EXPECT_PRED_FORMAT2(IsSubstring, "clone() what is needed", text);
          }
          EXPECT_PRED_FORMAT2(
              IsSubstring,
              "parameter 'layer2.weight', or a view",
              error_of([&] { column.sum(); }));
        }
        train_on(m, run);
      }),
      {.strategies = kSharded});
}

TEST(ParameterUse, ARegulariserInsideARegionTrains) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto loss = m.loss(rows);
    for (auto& layer : m.layers) {
      loss = loss + 0.01 * layer->weight.pow(2).sum() +
          0.01 * layer->bias.abs().sum();
    }
    return loss;
  }));
}

TEST(ParameterUse, ALossInARegionOfItsOwnTrains) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto y =
          run.forward([&] { return m.forward(m.input(run.rows())); });
      const auto tied = run.forward([&] { return y.mm(m.weight(0).t()); });
      const auto penalty = run.forward([&] { return m.weight(3).norm(); });
      (tied.pow(2).mean() + 0.1 * penalty).backward();
      run.record_gradients("of three regions");
      run.step();
    }
  }));
}

} // namespace
} // namespace fsdp::testing::parameter_use
