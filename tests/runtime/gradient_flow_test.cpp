// Which gradients there are, when, and whose: autograd::grad, several passes,
// several graphs, unused and frozen parameters.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

#include <future>

namespace fsdp::testing::gradient_flow {
namespace {

using at::Tensor;
using torch::autograd::grad;

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

void in_thread(const std::function<void()>& call) {
  std::async(std::launch::async, call).get();
}

TEST(GradientFlow, GradOutsideARegionIsWholeAndOfThisRankAlone) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    const auto m = build_model();
    const auto plain = build_model();
    const auto rows = torch::arange(world.rank(), kRows, world.size());
    ShardedTensors net(m->units(), world, Options().strategy(s));
    const auto loss = net.call([&] { return m->loss(rows); });
    const auto mine = grad({loss}, net.parameters());
    std::vector<Tensor> parameters;
    for (auto& layer : plain->layers) {
      parameters.insert(parameters.end(), {layer->weight, layer->bias});
    }
    const auto expected = grad({plain->loss(rows)}, parameters);
    ASSERT_EQ(mine.size(), expected.size());
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::equal(mine[i], expected[i])) << "gradient " << i;
      EXPECT_FALSE(net.parameters()[i].grad().defined());
    }
    // Shards again, and an accumulating pass is not disturbed.
    EXPECT_EQ(m->weight(0).dim(), s == Strategy::kNoShard ? 2 : 1);
  });
}

TEST(GradientFlow, GradInsideARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      std::vector<Tensor> grads;
      run.forward(
          [&] { grads = grad({m.loss(run.rows())}, run.parameters()); });
      for (const auto& each : grads) {
        run.record_mean("grad in a region", each);
      }
      loss_in_region(m, run).backward();
      run.record_gradients("after backward");
      run.step();
    }
  }));
}

TEST(GradientFlow, GradOfSomeParametersLeavesGradAlone) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    loss_in_region(m, run).backward();
    const auto loss = run.forward(
        [&] { return torch::tanh(m.layers[1](m.input(run.rows()))).mean(); });
    const auto grads = grad(
        {loss}, {m.weight(1), m.weight(3)}, {}, false, false, /*unused=*/true);
    run.record_mean("grad of the used one", grads[0]);
    run.record("grad of the unused one", grads[1].defined() ? 1.0 : 0.0);
    run.record_gradients("of the pass before");
  }));
}

TEST(GradientFlow, BackwardWithInputs) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      loss_in_region(m, run).backward(
          {}, false, false, std::vector<Tensor>{m.weight(0), m.weight(2)});
      run.record_gradients("of the inputs");
      run.step();
    }
    loss_in_region(m, run).backward();
    run.record_gradients("of all");
  }));
}

TEST(GradientFlow, BackwardInsideARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
        const auto loss = m.loss(run.rows());
        loss.backward();
        run.record_mean("loss", loss);
      });
      run.record_gradients("when the region has closed");
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(GradientFlow, SeveralBackwardsInsideOneRegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
        m.loss(run.rows()).backward();
        run.forward([&] { (2 * m.loss(run.rows())).backward(); });
        m.layers[1](m.input(run.rows())).mean().backward();
      });
      run.record_gradients("of three passes");
      run.step();
    }
  }));
}

TEST(GradientFlow, GradientsInsideARegionAreShardsToo) {
  in_worlds({1, 2, 3}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    const auto local_numel = m->weight(1).numel();
    auto region = net.region();
    net.call([&] { m->loss(torch::arange(kRows)).backward(); });
    EXPECT_EQ(m->weight(1).dim(), 2);
    EXPECT_EQ(m->weight(1).grad().dim(), 1);
    EXPECT_EQ(m->weight(1).grad().numel(), local_numel);
    region.close();
    EXPECT_EQ(m->weight(1).grad().sizes(), m->weight(1).sizes());
  });
}

TEST(GradientFlow, ZeroGradForgetsAPassInsideTheSameRegion) {
  for (const bool to_none : {true, false}) {
    expect_same_program(program_with([to_none](TanhLayers& m, Trial& run) {
      torch::optim::SGD optimizer(run.parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        run.forward([&] {
          m.loss(run.rows()).backward();
          optimizer.zero_grad(to_none);
          (3 * m.loss(run.rows())).backward();
        });
        run.record_gradients("of the second pass alone");
        optimizer.step();
      }
    }));
  }
}

TEST(GradientFlow, ZeroGradInsideARegionForgetsEarlierPasses) {
  for (const bool to_none : {true, false}) {
    expect_same_program(program_with([to_none](TanhLayers& m, Trial& run) {
      torch::optim::SGD optimizer(run.parameters(), 0.1);
      loss_in_region(m, run).backward();
      const auto loss = run.forward([&] {
        const auto inside = (3 * m.loss(run.rows()));
        optimizer.zero_grad(to_none);
        return inside;
      });
      loss.backward();
      run.record_gradients("of the second pass alone");
    }));
  }
}

TEST(GradientFlow, AccumulationOverSeveralPasses) {
  for (const bool to_none : {true, false}) {
    expect_same_program(program_with([to_none](TanhLayers& m, Trial& run) {
      torch::optim::SGD optimizer(
          run.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 3; ++step) {
        for (int pass = 1; pass <= 3; ++pass) {
          run.forward([&] { return pass * m.loss(run.rows()); }).backward();
        }
        run.record_gradients("of three passes");
        optimizer.step();
        optimizer.zero_grad(to_none);
      }
      run.record_parameters("at the end");
    }));
  }
}

TEST(GradientFlow, ZeroGradBetweenForwardAndBackward) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    torch::optim::SGD optimizer(run.parameters(), 0.1);
    for (const bool to_none : {true, false, true}) {
      const auto loss = loss_in_region(m, run);
      optimizer.zero_grad(to_none);
      loss.backward();
      run.record_gradients("of one pass");
      optimizer.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(GradientFlow, SeveralForwardsOneBackward) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto first = loss_in_region(m, run);
      const auto second = run.forward(
          [&] { return m.forward(2 * m.input(run.rows())).mean(); });
      const auto third =
          run.forward([&] { return m.layers[2](m.input(run.rows())).mean(); });
      (first + 2 * second - third).backward();
      run.record_gradients("of the sum");
      run.step();
    }
  }));
}

TEST(GradientFlow, SeveralRoots) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto first = loss_in_region(m, run);
      const auto second = run.forward(
          [&] { return m.forward(2 * m.input(run.rows())).mean(0); });
      torch::autograd::backward(
          {first, second}, {Tensor(), torch::arange(15).to(torch::kFloat)});
      run.record_gradients("of both roots");
      run.step();
    }
  }));
}

TEST(GradientFlow, KeptGraphWithTwoLossesOverOneTrunk) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      Tensor first;
      Tensor second;
      run.forward([&] {
        const auto trunk = m.layers[1](m.layers[0](m.input(run.rows())));
        first = m.layers[2](trunk).pow(2).mean();
        second = m.layers[3](trunk).pow(2).mean();
      });
      first.backward({}, /*retain_graph=*/true);
      run.record_gradients("of the first loss");
      second.backward({}, /*retain_graph=*/true);
      second.backward();
      run.record_gradients("of all passes");
      run.step();
    }
  }));
}

TEST(GradientFlow, LayersUsedManyTimes) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    auto y = m.input(rows);
    for (int round = 0; round < 3; ++round) {
      for (auto& layer : m.layers) {
        y = torch::layer_norm(y + torch::gelu(layer(y)), {15});
      }
      y = m.layers[0](y) + m.layers[3](m.layers[1](y));
    }
    return y.pow(3).mean();
  }));
}

TEST(GradientFlow, GraphsKeptOverStepsAndFreedInAnotherThread) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    std::vector<Tensor> kept;
    for (int step = 0; step < 3; ++step) {
      auto loss = loss_in_region(m, run);
      loss.backward({}, /*retain_graph=*/true);
      run.record_mean("loss", loss);
      run.record_gradients("with a kept graph");
      kept.push_back(std::move(loss));
      if (step == 1) {
        in_thread([&] { kept.clear(); });
      }
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(GradientFlow, BackwardInAnotherThreadThanForward) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      Tensor loss;
      in_thread([&] { loss = loss_in_region(m, run); });
      in_thread([&] { loss.backward(); });
      run.record_gradients("of two threads");
      run.step();
    }
  }));
}

TEST(GradientFlow, DataChangedBetweenForwardAndBackward) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      const auto loss = loss_in_region(m, run);
      for (const auto& parameter : run.parameters()) {
        parameter.data().mul_(0.9);
      }
      loss.backward();
      run.record_gradients("with the new values");
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

} // namespace
} // namespace fsdp::testing::gradient_flow
