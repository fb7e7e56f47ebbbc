// AdamW and Adam on shards against libtorch's on whole parameters.

#include "train/training.h"

namespace fsdp::testing {
namespace fused_adam {

namespace optim = torch::optim;
using at::Tensor;

TEST(FusedAdam, AdamWIsLibtorchs) {
  expect_same_steps<optim::AdamW, AdamW>(optim::AdamWOptions(0.01).eps(1e-4));
}

TEST(FusedAdam, AdamWIsLibtorchsInFloat32) {
  expect_same_steps<optim::AdamW, AdamW>(
      optim::AdamWOptions(0.01).eps(1e-4), torch::kFloat);
}

TEST(FusedAdam, AdamWWithAmsgradAndDecayIsLibtorchs) {
  expect_same_steps<optim::AdamW, AdamW>(
      optim::AdamWOptions(0.01).eps(1e-4).amsgrad(true).weight_decay(0.1));
}

TEST(FusedAdam, AdamWWithoutDecayAndWithOtherBetasIsLibtorchs) {
  expect_same_steps<optim::AdamW, AdamW>(
      optim::AdamWOptions(0.01).eps(1e-3).betas({0.5, 0.7}).weight_decay(0));
}

TEST(FusedAdam, AdamIsLibtorchs) {
  expect_same_steps<optim::Adam, Adam>(optim::AdamOptions(0.01).eps(1e-4));
}

TEST(FusedAdam, AdamWithAmsgradAndDecayIsLibtorchs) {
  expect_same_steps<optim::Adam, Adam>(
      optim::AdamOptions(0.01).eps(1e-4).amsgrad(true).weight_decay(0.1));
}

template <class N>
ParamGroups decay_groups(N& net) {
  ParamGroups groups;
  for (const double decay : {0.3, 0.0}) {
    std::vector<Tensor> tensors;
    for (const auto& each : net->named_parameters()) {
      const bool decays =
          contains(each.key(), "weight") && !contains(each.key(), "norm");
      if (decays == (decay > 0)) {
        tensors.push_back(each.value());
      }
    }
    groups.emplace_back(
        tensors,
        std::make_unique<optim::AdamWOptions>(
            optim::AdamWOptions(0.01 + decay).eps(1e-4).weight_decay(decay)));
  }
  return groups;
}

TEST(FusedAdam, ParamGroupsKeepTheirOptions) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        const auto optimizer =
            optimizer_for<optim::AdamW, AdamW>(net, decay_groups(net));
        for (int step = 0; step < 3; ++step) {
          train_step(net, log, step);
          optimizer->step();
          optimizer->zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

TEST(FusedAdam, OneOverTheHeadLeavesTheRestAlone) {
  expect_same_program(make_network, [](auto& net, Log& log) {
    const auto optimizer = optimizer_for<optim::Adam, Adam>(
        net, net->head->parameters(), optim::AdamOptions(0.01).eps(1e-4));
    for (int step = 0; step < 3; ++step) {
      train_step(net, log, step);
      optimizer->step();
      net->zero_grad();
    }
    log.parameters(net);
  });
}

TEST(FusedAdam, AGroupThatIsAddedLaterBeginsAtItsFirstStep) {
  expect_same_program(make_network, [](auto& net, Log& log) {
    auto groups = decay_groups(net);
    const auto optimizer =
        optimizer_for<optim::AdamW, AdamW>(net, ParamGroups{groups[1]});
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        optimizer->add_param_group(groups[0]);
      }
      train_step(net, log, step);
      optimizer->step();
      net->zero_grad();
      log.parameters(net);
    }
  });
}

TEST(FusedAdam, AClosureRunsWithGradientsAndASchedulerSetsTheRate) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        const auto optimizer = optimizer_for<optim::Adam, Adam>(
            net, net.parameters(), optim::AdamOptions(0.02).eps(1e-4));
        optim::StepLR schedule(*optimizer, 2, 0.5);
        for (int step = 0; step < 5; ++step) {
          const torch::NoGradGuard no_grad;
          log.loss(optimizer->step([&] {
            optimizer->zero_grad();
            auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
            loss.backward();
            return loss;
          }));
          schedule.step();
        }
        log.value("rate", optimizer->param_groups()[0].options().get_lr());
        log.parameters(net);
      },
      settings);
}

TEST(FusedAdam, IsLibtorchsWithTheOtherStrategies) {
  ProgramSettings settings;
  settings.options.units(each<Block>()).shard_size(2);
  settings.world_sizes = {2, 4};
  settings.strategies = {
      Strategy::kShardOptimizer,
      Strategy::kHybridShard,
      Strategy::kHybridShardGradOp};
  settings.same_bits = false; // sums over groups of ranks
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        const auto optimizer = optimizer_for<optim::AdamW, AdamW>(
            net, net.parameters(), optim::AdamWOptions(0.01).eps(1e-4));
        for (int step = 0; step < 4; ++step) {
          train_step(net, log, step);
          optimizer->step();
          optimizer->zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

TEST(FusedAdam, MixedPrecisionUpdatesWhatIsHeldAtRest) {
  const auto train = [](auto make_optimizer, const World& world, Strategy s) {
    FullyShardedDataParallel net(
        seeded(make_network),
        world,
        Options()
            .strategy(s)
            .units(each<Block>())
            .mixed_precision(
                {.param_dtype = torch::kBFloat16,
                 .reduce_dtype = torch::kFloat}));
    const auto optimizer = make_optimizer(net.parameters());
    for (int step = 0; step < 3; ++step) {
      net(wave({4, 3}, 0.7 + step)).pow(2).mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
    EXPECT_EQ(net.parameters()[0].scalar_type(), torch::kFloat);
    return whole_values(net);
  };
  const auto options = optim::AdamWOptions(0.01).eps(1e-3);
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    on_ranks(3, [&](const World& world) {
      const auto expected = train(
          [&](const auto& parameters) {
            return std::make_unique<optim::AdamW>(parameters, options);
          },
          world,
          strategy);
      const auto actual = train(
          [&](const auto& parameters) {
            return std::make_unique<AdamW>(parameters, options);
          },
          world,
          strategy);
      for (size_t i = 0; i < expected.size(); ++i) {
        // A last bit may decide how a weight is rounded to 16 bits.
        EXPECT_TRUE(all_close(actual[i].second, expected[i].second, 1e-4, 1e-6))
            << expected[i].first;
      }
    });
  }
}

TEST(FusedAdam, OneOverTwoNetsThatAreTrainedInTurn) {
  const auto options = optim::AdamWOptions(0.01).eps(1e-4);
  const auto train = [&](auto& one, auto& two, auto& optimizer) {
    for (int step = 0; step < 4; ++step) {
      const auto x = wave({4, 3}, 0.7 + step);
      (step % 2 == 0 ? one(x) : two(x)).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  const auto both = [](const auto& one, const auto& two) {
    auto parameters = one.parameters();
    const auto more = two.parameters();
    parameters.insert(parameters.end(), more.begin(), more.end());
    return parameters;
  };
  Plain one(seeded(make_network, 1));
  Plain two(seeded(make_network, 2));
  optim::AdamW expected(both(one, two), options);
  train(one, two, expected);
  const auto values = values_of(two);
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel first(seeded(make_network, 1), world);
    FullyShardedDataParallel second(seeded(make_network, 2), world);
    AdamW optimizer(both(first, second), options);
    train(first, second, optimizer);
    const auto actual = whole_values(second);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(all_close(actual[i].second, values[i].second, 1e-6, 1e-8))
          << values[i].first;
    }
  });
}

TEST(FusedAdam, StateIsOfShardsAndCountsSteps) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    Adam optimizer(net.parameters(), optim::AdamOptions(0.01).amsgrad(true));
    for (int step = 0; step < 2; ++step) {
      net(wave({4, 3})).pow(2).mean().backward();
      optimizer.step();
    }
    for (const auto& parameter : net.parameters()) {
      const auto& state = static_cast<const optim::AdamParamState&>(
          *optimizer.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_EQ(state.exp_avg().sizes(), parameter.sizes());
      EXPECT_EQ(state.exp_avg_sq().sizes(), parameter.sizes());
      EXPECT_EQ(state.max_exp_avg_sq().sizes(), parameter.sizes());
      EXPECT_EQ(state.step(), 2);
    }
  });
}

/// Elements that libtorch's kernel computes as whole vectors when it gets a
/// tensor alone: all but the last, at most.
int64_t in_vectors(const Tensor& tensor) {
  return tensor.numel() / 64 * 64;
}

TEST(FusedAdam, HasTheBitsOfLibtorchsKernelOnWholeTensors) {
  const std::vector<std::vector<int64_t>> sizes = {{8, 16}, {70}, {5, 50}, {9}};
  Tensors plain(sizes);
  std::vector<Tensor> moments;
  std::vector<Tensor> squares;
  for (const auto& value : plain.values) {
    moments.push_back(torch::zeros_like(value));
    squares.push_back(torch::zeros_like(value));
  }
  for (double step = 1; step <= 3; ++step) {
    const torch::NoGradGuard no_grad;
    const std::vector<Tensor> steps(sizes.size(), torch::tensor(step));
    at::_fused_adamw_(
        plain.values,
        plain.gradients,
        moments,
        squares,
        {},
        steps,
        /*lr=*/0.01,
        /*beta1=*/0.9,
        /*beta2=*/0.999,
        /*weight_decay=*/0.1,
        /*eps=*/1e-8,
        /*amsgrad=*/false,
        /*maximize=*/false);
  }
  for (const int size : {1, 2, 4}) { // the mean of equal numbers is exact
    on_ranks(size, [&](const World& world) {
      Tensors tensors(sizes);
      ShardedTensors net(tensors.units(), world);
      AdamW optimizer(
          net.parameters(), optim::AdamWOptions(0.01).weight_decay(0.1));
      for (int step = 0; step < 3; ++step) {
        net.call([&] { return tensors.loss(); }).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto values = whole_values(net);
      for (size_t i = 0; i < values.size(); ++i) {
        const auto actual = values[i].second.reshape({-1});
        const auto expected = plain.values[i].detach().reshape({-1});
        const auto exact = in_vectors(expected);
        EXPECT_TRUE(
            at::equal(actual.slice(0, 0, exact), expected.slice(0, 0, exact)))
            << i;
        EXPECT_TRUE(all_close(actual, expected, 2e-7, 0)) << i;
      }
    });
  }
}

} // namespace fused_adam
} // namespace fsdp::testing
