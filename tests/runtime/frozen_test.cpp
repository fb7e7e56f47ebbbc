// requires_grad flags that change after sharding: frozen later, thawed later.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Sets flags before steps; the same in the unsharded training.
ChainTraining toggling(const std::function<void(int step, Chain&)>& toggle) {
  ChainTraining training;
  training.settings.steps = 5;
  training.before_step = [toggle](int step, Chain& chain, ShardedTensors*) {
    toggle(step, chain);
  };
  return training;
}

TEST(Frozen, AWeightThatIsFrozenLaterStays) {
  expect_same_training(toggling([](int step, Chain& chain) {
    if (step == 2) {
      chain.weight(1).set_requires_grad(false);
    }
  }));
}

TEST(Frozen, AWholeUnitThatIsFrozenLaterStays) {
  expect_same_training(toggling([](int step, Chain& chain) {
    if (step == 2) {
      chain.weight(3).set_requires_grad(false);
      chain.bias(3).set_requires_grad(false);
    }
  }));
}

TEST(Frozen, EverythingButOneBiasIsFrozenLater) {
  expect_same_training(toggling([](int step, Chain& chain) {
    if (step == 1) {
      for (auto& parameter : chain.parameters()) {
        parameter.set_requires_grad(parameter.is_same(chain.bias(1)));
      }
    }
  }));
}

TEST(Frozen, AParameterThatIsThawedLaterTrains) {
  expect_same_training(toggling([](int step, Chain& chain) {
    if (step == -1) {
      chain.weight(1).set_requires_grad(false);
      chain.bias(2).set_requires_grad(false);
    }
    if (step == 2) {
      chain.weight(1).set_requires_grad(true);
    }
    if (step == 3) {
      chain.bias(2).set_requires_grad(true);
    }
  }));
}

TEST(Frozen, FlagsThatChangeInEveryStep) {
  expect_same_training(toggling([](int step, Chain& chain) {
    for (size_t i = 0; i < 4; ++i) {
      chain.weight(i).set_requires_grad((step + i) % 2 == 0);
      chain.bias(i).set_requires_grad((step + i) % 3 != 0);
    }
  }));
}

TEST(Frozen, FlagsThatChangeInsideARegion) {
  auto calls = [](Chain& chain) { // counts in a tensor that the chain keeps
    if (!chain.kept.defined()) {
      chain.kept = torch::zeros({}, at::kLong);
    }
    return chain.kept.add_(1).item<int64_t>();
  };
  ChainTraining training;
  training.loss = [calls](Chain& chain, const Tensor& rows) {
    const auto call = calls(chain);
    chain.weight(1).set_requires_grad(call != 2);
    chain.bias(3).set_requires_grad(call > 2);
    return chain.loss(rows);
  };
  expect_same_training(training);
}

TEST(Frozen, FrozenBetweenForwardAndBackwardGetsNoGradient) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    const auto loss =
        net.call([&] { return chain.loss(rows_of_rank(net.world())); });
    chain.weight(1).set_requires_grad(false);
    loss.backward();
    EXPECT_FALSE(chain.weight(1).grad().defined());
    EXPECT_TRUE(chain.bias(1).grad().defined());
    EXPECT_TRUE(chain.weight(0).grad().defined());
    chain.weight(1).set_requires_grad(true);
    for (auto& parameter : chain.parameters()) {
      parameter.mutable_grad().reset();
    }
  });
}

TEST(Frozen, ThawedLaterHasAnIntervalOfItsOwn) {
  // Gradients that were there before keep their values and are added to.
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step != 1) {
      return;
    }
    const auto rows =
        net == nullptr ? torch::arange(kRows) : rows_of_rank(net->world());
    const auto backward = [&] {
      if (net != nullptr) {
        net->call([&] { return chain.loss(rows); }).backward();
      } else {
        chain.loss(rows).backward();
      }
    };
    backward();
    chain.weight(2).set_requires_grad(false);
    backward();
    chain.weight(2).set_requires_grad(true);
    backward();
  };
  expect_same_training(training);
}

TEST(Frozen, ChangeWhileGradientsWaitForAReductionIsRefused) {
  run_ranks(
      2,
      [](const World& world) {
        const auto chain = build_chain();
        ShardedTensors net(chain->units(), world);
        const auto backward = [&] {
          net.call([&] { return chain->loss(rows_of_rank(world)); }).backward();
        };
        {
          const auto local = net.no_sync();
          backward();
        }
        chain->weight(2).set_requires_grad(false);
        EXPECT_TRUE(fails_with(
            backward, {"'layer2.weight'", "no_sync", "requires_grad"}));
        chain->weight(2).set_requires_grad(true);
        // The pass that waited is lost, and does not go missing silently.
        EXPECT_TRUE(
            fails_with(backward, {"no_sync", "were dropped", "zero_grad()"}));
        backward();
        const auto alone = chain->weight(2).grad().clone();
        for (auto& parameter : chain->parameters()) {
          parameter.mutable_grad().reset();
        }
        backward();
        EXPECT_TRUE(at::equal(alone, chain->weight(2).grad()));
      },
      kWaitLimit);
}

TEST(Frozen, RanksThatDisagreeAreToldSo) {
  auto settings = split_strategies();
  settings.strategies.push_back(Strategy::kNoShard);
  settings.world_sizes = {2, 3, 4};
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const bool first = net.world().rank() == 0;
        chain.weight(2).set_requires_grad(!first);
        const auto rows = rows_of_rank(net.world());
        EXPECT_TRUE(fails_with(
            [&] { net.call([&] { return chain.loss(rows); }).backward(); },
            {"rank", "differ", "unit 'layer2'"}));
        chain.weight(2).set_requires_grad(true);
        for (auto& parameter : chain.parameters()) {
          parameter.mutable_grad().reset();
        }
      },
      settings);
}

TEST(Frozen, AdaptersOverAFrozenBase) {
  struct Adapted {
    Chain base;
    Tensor down = torch::randn({4, 15}).requires_grad_();
    Tensor up = torch::zeros({15, 4}).requires_grad_();
  };
  ParitySettings settings;
  settings.optimizer = Optimizer::kSgd; // AdamW magnifies the zeros of `up`
  const auto make = [] {
    const auto owner = std::make_shared<Adapted>();
    for (auto& layer : owner->base.layers) {
      layer->weight.set_requires_grad(false);
    }
    // The optimizer takes what requires a gradient when it is made.
    auto units = owner->base.units();
    units.push_back({"adapters", {{"down", owner->down}, {"up", owner->up}}});
    return TestModel{
        units,
        [owner](const Tensor& rows) {
          auto y = owner->base.x.index_select(0, rows);
          for (auto& layer : owner->base.layers) {
            const auto low = torch::linear(y, owner->down);
            y = torch::tanh(layer->forward(y) + torch::linear(low, owner->up));
          }
          return y.pow(2).mean();
        },
        owner};
  };
  expect_same_training(make, settings);
}

TEST(Frozen, FlagOfAFrozenBaseDoesNotCostAReduction) {
  run_ranks(
      2,
      [](const World& world) {
        const auto chain = build_chain();
        for (auto& layer : chain->layers) {
          layer->weight.set_requires_grad(false);
        }
        ShardedTensors net(chain->units(), world);
        int64_t largest = 0;
        auto loss = net.call([&] {
          auto y = chain->forward(chain->x);
          return y.pow(2).mean();
        });
        chain->layers[0]->bias.register_hook([&](const Tensor&) {
          largest = net.memory().unreduced_gradient_bytes;
        });
        loss.backward();
        // Buffers of biases only: 15 of them padded to 64, not 225.
        EXPECT_LE(largest, 4 * 64 * 4);
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_FALSE(chain->weight(i).grad().defined());
          EXPECT_TRUE(chain->bias(i).grad().defined());
        }
      },
      kWaitLimit);
}

} // namespace
} // namespace fsdp::testing
