// Parameters that are not used, or frozen, in some steps or on some ranks.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::unused_parameters {
namespace {

using at::Tensor;

Tensor loss_in_region(TanhLayers& m, Trial& run) {
  return run.forward([&] { return m.loss(run.rows()); });
}

TEST(UnusedParameters, HaveNoGradient) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
           auto y = torch::tanh(m.layers[0](m.input(run.rows())));
           y = torch::linear(y, m.weight(1)); // not the bias
           return torch::tanh(m.layers[3](y)).pow(2).mean();
         })
          .backward();
      run.record_gradients("without layer2");
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(UnusedParameters, AnotherLayerIsLeftOutInEachStep) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (size_t step = 0; step < 6; ++step) {
      run.forward([&] {
           auto y = m.input(run.rows());
           for (size_t i = 0; i < 4; ++i) {
             y = i == step % 4 ? y : torch::tanh(m.layers[i](y));
           }
           return y.pow(2).mean();
         })
          .backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
  }));
}

struct Frozen : TanhLayers {
  Frozen() {
    weight(1).set_requires_grad(false);
    layers[2]->weight.set_requires_grad(false);
    layers[2]->bias.set_requires_grad(false);
  }
};

TEST(UnusedParameters, FrozenParametersStayAsTheyAre) {
  expect_same_program(program_with<Frozen>([](Frozen& m, Trial& run) {
    const auto before = build_model<Frozen>();
    for (int step = 0; step < 3; ++step) {
      loss_in_region(m, run).backward();
      run.record_gradients("of what is trained");
      run.step();
    }
    run.record_parameters("at the end");
    run.forward([&] {
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(m.weight(2), before->weight(2)));
    });
  }));
}

TEST(UnusedParameters, FrozenAndThawedWhileTraining) {
  expect_same_program(program_with<Frozen>([](Frozen& m, Trial& run) {
    for (int step = 0; step < 5; ++step) {
      m.weight(3).set_requires_grad(step != 1);
      m.weight(1).set_requires_grad(step >= 3);
      loss_in_region(m, run).backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(UnusedParameters, AllParametersFrozen) {
  expect_same_program(
      program_with([](TanhLayers& m, Trial& run) {
        for (const auto& parameter : run.parameters()) {
          parameter.set_requires_grad(false);
        }
        auto x = m.input(run.rows()).set_requires_grad(true);
        run.forward([&] { return m.forward(x).pow(2).sum(); }).backward();
        run.record("gradients", run.parameters()[0].grad().defined() ? 1 : 0);
        run.record_mean("gradient of the input", x.grad().abs().sum());
      }),
      {.batch = Batch::kSame});
}

TEST(UnusedParameters, DifferentParametersOnEachRank) {
  // Rank r leaves out the bias of layer r: the others' gradients count, its own
  // is zero. (Units must be the same on all ranks, parameters need not.)
  in_worlds({2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    const auto m = build_model();
    const auto plain = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(s));
    const auto loss = [](TanhLayers& model, int left_out) {
      auto y = model.x;
      for (int i = 0; i < 4; ++i) {
        const auto& layer = model.layers[static_cast<size_t>(i)];
        y = torch::tanh(
            i == left_out ? torch::linear(y, layer->weight)
                          : torch::linear(y, layer->weight, layer->bias));
      }
      return y.pow(2).mean();
    };
    for (int step = 0; step < 3; ++step) {
      net.call([&] { return loss(*m, world.rank()); }).backward();
      for (int rank = 0; rank < world.size(); ++rank) {
        loss(*plain, rank).backward();
      }
      for (size_t i = 0; i < 4; ++i) {
        const auto mean = plain->layers[i]->bias.grad() / world.size();
        const auto& gradient = m->layers[i]->bias.grad();
        const auto whole = s == Strategy::kNoShard
            ? gradient
            : join_shards(world, gradient, mean.sizes());
        EXPECT_TRUE(all_close(whole, mean, 1e-6, 1e-8)) << "layer " << i;
        for (auto* model : {m.get(), plain.get()}) {
          model->weight(i).mutable_grad().reset();
          model->layers[i]->bias.mutable_grad().reset();
        }
      }
    }
  });
}

TEST(UnusedParameters, DifferentUnitsOnEachRankWhenNothingIsGathered) {
  in_worlds({2, 3}, {Strategy::kNoShard}, [](const World& world, Strategy s) {
    const auto m = build_model();
    const auto plain = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(s));
    const auto loss = [](TanhLayers& model, int left_out) {
      auto y = model.x;
      for (int i = 0; i < 4; ++i) {
        y = i == left_out
            ? y
            : torch::tanh(model.layers[static_cast<size_t>(i)](y));
      }
      return y.pow(2).mean();
    };
    for (int step = 0; step < 3; ++step) {
      net.call([&] { return loss(*m, (world.rank() + step) % 4); }).backward();
      for (int rank = 0; rank < world.size(); ++rank) {
        loss(*plain, (rank + step) % 4).backward();
      }
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(all_close(
            m->weight(i).grad(),
            plain->weight(i).grad() / world.size(),
            1e-6,
            1e-8))
            << "layer " << i << " in step " << step;
        for (auto* model : {m.get(), plain.get()}) {
          model->weight(i).mutable_grad().reset();
          model->layers[i]->bias.mutable_grad().reset();
        }
      }
    }
  });
}

} // namespace
} // namespace fsdp::testing::unused_parameters
