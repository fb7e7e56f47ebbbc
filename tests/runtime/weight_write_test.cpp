// Writes to weights inside a region reach the shards, whatever way they take.

#include "harness/failing_training.h"
#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::weight_write {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

/// Trains a model of which each layer's weight is changed by `write` before it
/// is used.
template <class F>
void expect_written(F write, const ParitySettings& settings = {}) {
  expect_same_training(
      model_with([write](TanhLayers& m, const Tensor& rows) {
        auto y = m.input(rows);
        for (auto& layer : m.layers) {
          write(layer->weight);
          y = torch::tanh(layer(y));
        }
        return y.pow(2).mean();
      }),
      settings);
}

TEST(WeightWrite, UnderNoGrad) {
  expect_written([](Tensor& weight) {
    const torch::NoGradGuard no_grad;
    weight.div_(weight.norm() * 0.3);
  });
}

TEST(WeightWrite, ThroughData) {
  expect_written([](Tensor& weight) { weight.data().mul_(0.9); });
}

TEST(WeightWrite, ThroughAViewOfDetach) {
  expect_written(
      [](Tensor& weight) { weight.detach().select(0, 1).mul_(0.5); });
  expect_written(
      [](Tensor& weight) { weight.detach().t().narrow(0, 3, 5).add_(0.01); });
}

TEST(WeightWrite, ByTheOutVariantOfAnOperator) {
  expect_written([](Tensor& weight) {
    const torch::NoGradGuard no_grad;
    at::mul_out(weight, weight, torch::full({15, 15}, 0.9));
    auto row = weight.select(0, 2);
    at::add_out(row, row, torch::full({15}, 0.01));
  });
}

TEST(WeightWrite, ByIndex) {
  expect_written([](Tensor& weight) {
    const torch::NoGradGuard no_grad;
    weight.index_put_(
        {torch::tensor({0, 14}), torch::tensor({3, 7})},
        torch::full({2}, 0.25));
    weight.masked_fill_(weight > 0.2, 0.2);
    weight.index({torch::indexing::Slice(2, 9), 1}).fill_(0.1);
    weight.diagonal().zero_();
  });
}

TEST(WeightWrite, ByCopyOfAnotherWeight) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    {
      const torch::NoGradGuard no_grad;
      m.weight(2).lerp_(m.weight(1), 0.1);
      m.weight(3).narrow(1, 0, 4).copy_(m.weight(0).narrow(1, 11, 4));
    }
    return m.loss(rows);
  }));
}

TEST(WeightWrite, ForeachOverAllUnits) {
  expect_same_training(model_with([](TanhLayers& m, const Tensor& rows) {
    std::vector<Tensor> all;
    for (auto& layer : m.layers) {
      all.insert(all.end(), {layer->weight, layer->bias});
    }
    {
      const torch::NoGradGuard no_grad;
      at::_foreach_mul_(all, 0.99);
      at::_foreach_add_(all, all, 0.01);
    }
    return m.loss(rows) + 1e-3 * at::stack(at::_foreach_norm(all)).sum();
  }));
}

TEST(WeightWrite, WithOneSlot) {
  ParitySettings settings;
  settings.options.slots(1);
  expect_written([](Tensor& weight) { weight.detach().mul_(0.9); }, settings);
}

TEST(WeightWrite, InANestedRegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
           run.forward([&] { m.weight(1).data().mul_(0.9); });
           run.forward([&] { m.layers[3]->bias.data().add_(0.1); });
           return m.loss(run.rows());
         })
          .backward();
      run.record_gradients("with the new values");
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(WeightWrite, InARegionWithoutAUseOfTheNet) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 2; ++step) {
      run.forward([&] {
        const torch::NoGradGuard no_grad;
        m.weight(step).clamp_(-0.1, 0.1);
      });
      run.forward([&] { return m.loss(run.rows()); }).backward();
      run.record_gradients("with the new values");
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(WeightWrite, InEvaluation) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      return run.forward([&] {
        m.weight(2).mul_(0.5);
        return m.loss(run.rows());
      });
    };
    run.record_mean("evaluation", evaluate());
    run.record_parameters("after the first");
    run.record_mean("evaluation", evaluate());
    run.forward([&] { return m.loss(run.rows()); }).backward();
    run.record_gradients("after evaluation");
  }));
}

TEST(WeightWrite, InBackward) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
           auto y = torch::tanh(m.layers[0](m.input(run.rows())));
           y.register_hook([&](const Tensor& /*gradient*/) {
             m.weight(3).data().mul_(0.9);
           });
           return m.forward(y).pow(2).mean();
         })
          .backward();
      run.record_gradients("of step " + std::to_string(step));
      run.record_parameters("of step " + std::to_string(step));
      run.step();
    }
  }));
}

TEST(WeightWrite, InitialisationInARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    run.forward([&] {
      const torch::NoGradGuard no_grad;
      for (auto& layer : m.layers) {
        layer->weight.normal_(0.0, 0.1, generator);
        layer->bias.zero_();
      }
    });
    run.record_parameters("after initialisation");
    run.forward([&] { return m.loss(run.rows()); }).backward();
    run.record_gradients("after initialisation");
  }));
}

TEST(WeightWrite, ElementWiseOnShardsOutsideOfARegion) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] { return m.loss(run.rows()); }).backward();
      run.step();
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : run.parameters()) {
        parameter.clamp_(-0.2, 0.2).mul_(0.99);
      }
    }
    run.record_parameters("at the end");
    run.record_mean("loss", run.forward([&] { return m.loss(run.rows()); }));
  }));
}

TEST(WeightWrite, OfAFrozenWeight) {
  struct Frozen : TanhLayers {
    Frozen() { weight(1).set_requires_grad(false); }
  };
  expect_same_training(model_with<Frozen>([](Frozen& m, const Tensor& rows) {
    m.weight(1).mul_(0.9); // grad mode is on
    return m.loss(rows);
  }));
}

TEST(WeightWrite, EachRankKeepsItsSlice) {
  in_worlds({1, 2, 3, 4}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    net.call([&] {
      const torch::NoGradGuard no_grad;
      m->weight(1).fill_(world.rank() + 1.0);
      m->loss(torch::arange(kRows)); // releases it
    });
    const auto whole = join_shards(world, m->weight(1), {15, 15});
    const auto mine = m->weight(1).detach();
    EXPECT_TRUE(at::equal(mine, torch::full_like(mine, world.rank() + 1.0)));
    const auto expect_joined = [&] {
      const torch::NoGradGuard no_grad;
      net.call([&] { EXPECT_TRUE(at::equal(m->weight(1), whole)); });
    };
    if (!weights_are_shared()) { // else each rank keeps its copy for now
      expect_joined();
    }
    net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    expect_joined();
    EXPECT_EQ(whole.max().item<float>(), world.size() == 1 ? 1.0F : 2.0F);
  });
}

TEST(WeightWrite, SixteenBitWeightsKeepTheBitsOfUnwrittenElements) {
  in_worlds({1, 2, 3}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto plain = build_model();
    ShardedTensors net(
        m->units(),
        world,
        Options().strategy(strategy).mixed_precision(
            {.param_dtype = torch::kBFloat16}));
    net.call([&] {
      const torch::NoGradGuard no_grad;
      m->weight(1).select(0, 7).fill_(0.5);
    });
    const torch::NoGradGuard no_grad;
    plain->weight(1).select(0, 7).fill_(0.5);
    EXPECT_TRUE(at::equal(
        join_shards(world, m->weight(1), {15, 15}), plain->weight(1)));
  });
}

TEST(WeightWrite, OptimizerStepInsideARegionIsRefused) {
  in_worlds({1, 2}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto plain = build_model();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    const auto text = error_of([&] { net.call([&] { optimizer.step(); }); });
    EXPECT_PRED_FORMAT2(IsSubstring, "inside a region", text);
    EXPECT_PRED_FORMAT2(
        IsSubstring, "optimizer.step() after the region has closed", text);
    // Nothing is changed.
    const auto whole = join_shards(world, m->weight(1), {15, 15});
    EXPECT_TRUE(at::equal(whole, plain->weight(1).detach()));
  });
}

TEST(WeightWrite, AWholeTrainingStepInsideARegionIsRefused) {
  for (const bool adaptive : {false, true}) {
    expect_same_program(
        program_with([adaptive](TanhLayers& m, Trial& run) {
          std::unique_ptr<torch::optim::Optimizer> optimizer;
          if (adaptive) {
            optimizer = std::make_unique<torch::optim::AdamW>(run.parameters());
          } else {
            optimizer =
                std::make_unique<torch::optim::SGD>(run.parameters(), 0.1);
          }
          if (run.sharded()) {
            const Snapshot before(*run.net());
            const auto text = error_of([&] {
              run.forward([&] {
                optimizer->zero_grad();
                m.loss(run.rows()).backward();
                optimizer->step();
              });
            });
            EXPECT_PRED_FORMAT2(IsSubstring, "parameter 'layer0.weight'", text);
            EXPECT_PRED_FORMAT2(
                IsSubstring,
                "optimizer.step() after the region has closed",
                text);
            before.expect_unchanged(*run.net());
          }
          for (int step = 0; step < 2; ++step) {
            run.forward([&] {
              m.loss(run.rows()).backward();
              m.loss(run.rows()).backward();
            });
            run.record_gradients("of step " + std::to_string(step));
            run.step();
          }
        }),
        {.strategies = kSharded});
  }
}

/// An embedding that renormalises the rows it looks up.
struct Renormed {
  torch::nn::Embedding table{torch::nn::EmbeddingOptions(20, 6).max_norm(0.7)};
  torch::nn::Linear head{6, 5};
  Tensor index = torch::randint(0, 20, {kRows, 3});

  NamedUnits units() const {
    return {
        {"table", {{"table.weight", table->weight}}},
        {"head", {{"head.weight", head->weight}, {"head.bias", head->bias}}}};
  }
};

TEST(WeightWrite, RenormalisedEmbedding) {
  // All ranks look up the same rows, so that all renormalise the same.
  expect_same_training(
      model_with<Renormed>([](Renormed& m, const Tensor& rows) {
        return m.head(m.table(m.index.index_select(0, rows))).pow(2).mean();
      }),
      {.batch = Batch::kSame});
}

} // namespace
} // namespace fsdp::testing::weight_write
