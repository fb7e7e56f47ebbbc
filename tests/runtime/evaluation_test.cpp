// Evaluation beside training: without gradients, in inference mode, and between
// a forward and its backward.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::evaluation {
namespace {

using at::Tensor;

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

enum class Mode : uint8_t { kNoGrad, kInference };

double evaluate(TanhLayers& m, Trial& run, Mode mode) {
  if (mode == Mode::kNoGrad) {
    const torch::NoGradGuard no_grad;
    const auto loss = loss_in_region(m, run);
    EXPECT_FALSE(loss.requires_grad());
    return loss.item<double>();
  }
  const c10::InferenceMode inference;
  const auto loss = loss_in_region(m, run);
  EXPECT_TRUE(loss.is_inference());
  return loss.item<double>();
}

void record_evaluation(TanhLayers& m, Trial& run, Mode mode) {
  run.record_mean(
      "evaluation", torch::tensor(evaluate(m, run, mode), torch::kDouble));
  if (run.sharded() && !keeps_whole_weights(*run.net())) {
    EXPECT_EQ(run.net()->memory().gathered_bytes, 0) << run.net()->describe();
  }
}

template <class F>
void expect_in_both_modes(F body) {
  for (const auto mode : {Mode::kNoGrad, Mode::kInference}) {
    expect_same_program(
        program_with([=](TanhLayers& m, Trial& run) { body(m, run, mode); }));
  }
}

TEST(Evaluation, BeforeTraining) {
  expect_in_both_modes([](TanhLayers& m, Trial& run, Mode mode) {
    record_evaluation(m, run, mode);
    for (int step = 0; step < 3; ++step) {
      const auto loss = loss_in_region(m, run);
      EXPECT_TRUE(loss.requires_grad());
      loss.backward();
      run.record_gradients("after evaluation");
      run.step();
    }
    run.record_parameters("at the end");
  });
}

TEST(Evaluation, AfterEachStep) {
  expect_in_both_modes([](TanhLayers& m, Trial& run, Mode mode) {
    for (int step = 0; step < 3; ++step) {
      loss_in_region(m, run).backward();
      record_evaluation(m, run, mode); // with gradients, not yet stepped
      run.record_gradients("of step " + std::to_string(step));
      run.step();
      record_evaluation(m, run, mode);
      record_evaluation(m, run, mode);
    }
    run.record_parameters("at the end");
  });
}

TEST(Evaluation, BetweenForwardAndBackward) {
  expect_in_both_modes([](TanhLayers& m, Trial& run, Mode mode) {
    for (int step = 0; step < 3; ++step) {
      const auto loss = loss_in_region(m, run);
      run.record_mean(
          "evaluation", torch::tensor(evaluate(m, run, mode), torch::kDouble));
      loss.backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
    run.record_parameters("at the end");
  });
}

TEST(Evaluation, InsideATrainingForward) {
  expect_same_training(
      model_with([](TanhLayers& m, const Tensor& rows) {
        double scale = 0;
        {
          const c10::InferenceMode inference;
          scale = m.weight(2).t().norm().item<double>();
        }
        {
          const torch::NoGradGuard no_grad;
          scale += m.forward(m.input(rows)).abs().max().item<double>();
        }
        return m.loss(rows) * scale;
      }),
      {.batch = Batch::kSame});
}

TEST(Evaluation, OfAMovingAverageUnderNoGrad) {
  // A teacher that follows the weights, shard by shard, and is evaluated by
  // copying it into the net.
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    std::vector<Tensor> average;
    const auto swap = [&] {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < average.size(); ++i) {
        const auto current = run.parameters()[i].clone();
        run.parameters()[i].copy_(average[i]);
        average[i] = current;
      }
    };
    for (const auto& parameter : run.parameters()) {
      average.push_back(parameter.detach().clone());
    }
    for (int step = 0; step < 3; ++step) {
      loss_in_region(m, run).backward();
      run.step();
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < average.size(); ++i) {
        average[i].lerp_(run.parameters()[i], 0.5);
      }
      swap();
      record_evaluation(m, run, Mode::kNoGrad);
      swap();
    }
    run.record_parameters("at the end");
  }));
}

TEST(Evaluation, KeepsNothingGatheredAndLeavesNoGraph) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(s));
    for (int i = 0; i < 3; ++i) {
      const c10::InferenceMode inference;
      const auto y = net.call([&] { return m->forward(m->x); });
      EXPECT_TRUE(y.is_inference());
      if (s != Strategy::kShardOptimizer) {
        EXPECT_EQ(net.memory().gathered_bytes, 0);
      }
    }
    // The parameters are ordinary tensors still.
    EXPECT_FALSE(m->weight(1).is_inference());
    EXPECT_TRUE(m->weight(1).requires_grad());
    EXPECT_FALSE(m->weight(1).grad().defined());
    net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    EXPECT_TRUE(m->weight(1).grad().defined());
    EXPECT_FALSE(m->weight(1).grad().is_inference());
  });
}

TEST(Evaluation, WholeParametersAreReadInInferenceMode) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    {
      const c10::InferenceMode inference;
      run.record_parameters("in inference mode");
    }
    loss_in_region(m, run).backward();
    run.record_gradients("after all");
  }));
}

TEST(Evaluation, OptimizerStepAfterReadingWholeParametersInInferenceMode) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      loss_in_region(m, run).backward();
      {
        const c10::InferenceMode inference;
        run.record_mean("largest", run.forward([&] {
          return m.weight(1).abs().max().clone();
        }));
      }
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

} // namespace
} // namespace fsdp::testing::evaluation
