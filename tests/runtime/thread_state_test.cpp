// Settings of a thread or of the process that the library must not depend on,
// and parameters whose contents the program exchanges.

#include "harness/tanh_layers.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/profiler_kineto.h>

namespace fsdp::testing::thread_state {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

void train(TanhLayers& m, Trial& run, int steps = 3) {
  for (int step = 0; step < steps; ++step) {
    const auto loss = loss_in_region(m, run);
    loss.backward();
    run.record_mean("loss", loss);
    run.record_gradients("of step " + std::to_string(step));
    run.step();
  }
  run.record_parameters("at the end");
}

TEST(ThreadState, RecordFunctionsAreOff) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    const at::RecordFunctionGuard off(false);
    train(m, run);
  }));
}

TEST(ThreadState, TheTouchKeyIsIncludedByTheThread) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto loss = run.forward([&] {
        const c10::impl::IncludeDispatchKeyGuard include(
            c10::DispatchKey::DeferredInit);
        return m.loss(run.rows());
      });
      loss.backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
  }));
}

TEST(ThreadState, AnomalyModeIsOn) {
  torch::autograd::AnomalyMode::set_enabled(true);
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) { train(m, run, 1); }),
      {.world_sizes = {1, 2}, .strategies = {Strategy::kFullShard}});
  torch::autograd::AnomalyMode::set_enabled(false);
}

TEST(ThreadState, TheProfilerIsOn) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(
      profiler::ProfilerState::KINETO, /*report_input_shapes=*/true);
  const std::set<profiler::ActivityType> activities{
      profiler::ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) { train(m, run); }),
      {.world_sizes = {1, 2}});
  const auto result = profiler::disableProfiler();
  EXPECT_GT(result->events().size(), 0);
}

TEST(ThreadState, ViewsOfWeightsAreCachedInTheFirstForward) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    std::vector<Tensor> cached;
    for (int step = 0; step < 4; ++step) {
      run.forward([&] {
           if (cached.empty()) {
             const torch::NoGradGuard no_grad;
             for (auto& layer : m.layers) {
               cached.push_back(layer->weight.detach().t());
             }
           }
           auto y = m.input(run.rows());
           for (size_t i = 0; i < 4; ++i) {
             y = torch::tanh(m.layers[i](y) + 0.1 * y.mm(cached[3 - i]));
           }
           return y.pow(2).mean();
         })
          .backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
  }));
}

TEST(ThreadState, AViewFromBeforeShardingIsRefused) {
  in_worlds({1, 2}, kAllStrategies, [](const World& world, Strategy s) {
    const auto m = build_model();
    const auto view = m->weight(2).t();
    const auto text = error_of([&] {
      const ShardedTensors net(m->units(), world, Options().strategy(s));
    });
    EXPECT_PRED_FORMAT2(
        IsSubstring, "holds a view of parameter 'layer2.weight'", text);
  });
}

TEST(ThreadState, WholeContentsAreExchangedBetweenSteps) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 4; ++step) {
      loss_in_region(m, run).backward();
      run.step();
      if (step % 2 == 1) {
        m.weight(1).set_data(torch::full({15, 15}, 0.01 * step));
        m.layers[2]->bias.set_data(torch::full({15}, 0.1));
      }
      run.record_mean("loss", loss_in_region(m, run));
    }
    run.record_parameters("at the end");
  }));
}

TEST(ThreadState, ContentsOfTheSameSizeAreExchangedBetweenSteps) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 4; ++step) {
      loss_in_region(m, run).backward();
      run.step();
      const torch::NoGradGuard no_grad;
      m.weight(step).set_data(m.weight(step).detach() * 0.5);
      run.record_mean("loss", loss_in_region(m, run));
    }
    run.record_parameters("at the end");
  }));
}

TEST(ThreadState, ContentsAreExchangedInARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
        m.weight(step).set_data(torch::full({15, 15}, 0.01));
      });
      loss_in_region(m, run).backward();
      run.record_gradients("with the new values");
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

/// Contents of another size or type are an error by name; when they are put
/// right, training goes on.
void expect_bad_contents(
    const Tensor& contents,
    const std::vector<std::string>& parts) {
  expect_same_program(
      program_with([=](TanhLayers& m, Trial& run) {
        loss_in_region(m, run).backward();
        run.step();
        if (run.sharded()) {
          const auto before = m.weight(2).detach();
          m.weight(2).set_data(contents);
          const auto text = error_of([&] { loss_in_region(m, run); });
          for (const auto& part : parts) {
            EXPECT_PRED_FORMAT2(IsSubstring, part, text);
          }
          EXPECT_EQ(m.weight(0).dim(), 1);
          m.weight(2).set_data(before);
        }
        train(m, run);
      }),
      {.strategies = kSharded});
}

TEST(ThreadState, ContentsOfAnotherSizeAreRefused) {
  expect_bad_contents(
      torch::ones({2, 3}),
      {"parameter 'layer2.weight'", "another size", "225", "but got 6"});
}

TEST(ThreadState, ContentsOfAnotherTypeAreRefused) {
  expect_bad_contents(
      torch::ones({15, 15}, torch::kDouble),
      {"parameter 'layer2.weight'", "another dtype", "Double"});
}

TEST(ThreadState, BadContentsInARegionAreRefusedWhenItCloses) {
  for (const bool throws : {false, true}) {
    expect_same_program(
        program_with([throws](TanhLayers& m, Trial& run) {
          if (run.sharded()) {
            const auto text = error_of([&] {
              run.forward([&] {
                m.weight(1).set_data(torch::ones({2, 3}));
                if (throws) {
                  throw std::runtime_error("parameter 'layer1.weight' broken");
                }
              });
            });
            EXPECT_PRED_FORMAT2(IsSubstring, "'layer1.weight'", text);
            EXPECT_PRED_FORMAT2(
                IsSubstring, throws ? "broken" : "another size", text);
            for (const auto& parameter : run.parameters()) {
              EXPECT_EQ(parameter.dim(), 1);
            }
          }
          train(m, run);
        }),
        {.strategies = kSharded});
  }
}

} // namespace
} // namespace fsdp::testing::thread_state
