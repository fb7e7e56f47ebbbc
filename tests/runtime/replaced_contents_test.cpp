// Parameters whose contents the program replaces or writes after sharding:
// set_data, Module::to, whole vectors, initialisation.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

/// New values for a weight, the same on all ranks.
Tensor fresh_values(double factor) {
  return torch::linspace(-factor, factor, 15 * 15).view({15, 15});
}

TEST(ReplacedContents, WholeTensorIsTakenOver) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors*) {
    if (step == 1) {
      chain.weight(1).set_data(fresh_values(0.5));
      chain.bias(2).set_data(torch::full({15}, 0.25));
    }
  };
  expect_same_training(training);
}

TEST(ReplacedContents, ShardSizedTensorIsTakenOver) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors*) {
    if (step == 1) {
      const torch::NoGradGuard no_grad;
      auto& weight = chain.weight(1);
      weight.set_data(weight.detach() * 0.5);
    }
  };
  expect_same_training(training);
}

TEST(ReplacedContents, WriteToAReplacedTensorIsTakenOver) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors*) {
    if (step == 1) {
      const torch::NoGradGuard no_grad;
      chain.weight(1).set_data(fresh_values(0.5));
      chain.weight(1).mul_(0.5);
    }
  };
  expect_same_training(training);
}

TEST(ReplacedContents, SetDataInARegionIsTakenOver) {
  ChainTraining training;
  training.loss = [](Chain& chain, const Tensor& rows) {
    chain.weight(1).set_data(fresh_values(0.5));
    return chain.loss(rows);
  };
  expect_same_training(training);
}

TEST(ReplacedContents, ReplacedInARegionAfterItsUseIsAnError) {
  // libtorch's graph would keep the old values; here they are gone.
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto old = whole_values(net)[2].second;
        const auto loss = net.call([&] {
          auto result = chain.loss(rows_of_rank(net.world()));
          chain.weight(1).set_data(fresh_values(0.5));
          return result;
        });
        EXPECT_TRUE(fails_with(
            [&] { loss.backward(); }, {"modified by an inplace operation"}));
        chain.weight(1).set_data(old);
      },
      split_strategies());
}

TEST(ReplacedContents, ReplacedBetweenUseAndBackwardIsAnError) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto old = whole_values(net)[2].second;
        const auto loss =
            net.call([&] { return chain.loss(rows_of_rank(net.world())); });
        chain.weight(1).set_data(fresh_values(0.5));
        EXPECT_TRUE(fails_with(
            [&] { loss.backward(); }, {"modified by an inplace operation"}));
        chain.weight(1).set_data(old);
      },
      split_strategies());
}

TEST(ReplacedContents, SetInPlaceInARegionIsTakenOver) {
  ChainTraining training;
  training.loss = [](Chain& chain, const Tensor& rows) {
    {
      const torch::NoGradGuard no_grad;
      chain.weight(1).set_(fresh_values(0.5));
    }
    return chain.loss(rows);
  };
  expect_same_training(training);
}

TEST(ReplacedContents, ReachUnitsThatAreKeptWhole) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto old = [&] {
          const auto whole = net.whole_parameters();
          return chain.weight(1).detach().clone();
        }();
        net.unshard();
        chain.weight(1).set_data(fresh_values(0.5));
        const auto read = [&] {
          const torch::NoGradGuard no_grad;
          return net.call([&] { return chain.weight(1) * 1; });
        };
        EXPECT_TRUE(at::equal(read(), fresh_values(0.5)));
        net.reshard();
        EXPECT_TRUE(at::equal(read(), fresh_values(0.5)));
        chain.weight(1).set_data(old);
      },
      split_strategies());
}

TEST(ReplacedContents, AnotherSizeIsRefusedByName) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    const auto old = chain.weight(1).detach().clone();
    chain.weight(1).set_data(torch::ones({7}));
    EXPECT_TRUE(fails_with(
        [&] { net.call([&] { return chain.forward(chain.x); }); },
        {"'layer1.weight'", "another size", "expected ", "got ", "7"}));
    chain.weight(1).set_data(old);
  });
}

TEST(ReplacedContents, AnotherSizeInARegionIsRefusedByName) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        EXPECT_TRUE(fails_with(
            [&] {
              net.call([&] { chain.weight(1).set_data(torch::ones({7})); });
            },
            {"'layer1.weight'", "another size", "expected 225", "got 7"}));
      },
      split_strategies());
}

/// After an error at the entrance of a region the net is as it was.
void expect_shards(Chain& chain, ShardedTensors& net) {
  for (const auto& unit : net.describe().units) {
    if (unit.strategy == Strategy::kNoShard) {
      continue;
    }
    size_t i = std::stoul(unit.name.substr(5));
    EXPECT_EQ(chain.weight(i).numel(), unit.parameters[0].local_numel);
    EXPECT_EQ(chain.bias(i).numel(), unit.parameters[1].local_numel);
  }
}

TEST(ReplacedContents, AnotherDtypeIsRefusedByNameUntilItIsTakenBack) {
  for (const bool all : {true, false}) {
    expect_undisturbed([all](Chain& chain, ShardedTensors& net) {
      const auto convert = [&](at::ScalarType dtype) {
        for (size_t i = all ? 0 : 2; i < (all ? 4U : 3U); ++i) {
          chain.layers[i]->to(dtype);
        }
      };
      convert(at::kDouble);
      const auto name = all ? "'layer0.weight'" : "'layer2.weight'";
      for (int times = 0; times < 2; ++times) {
        EXPECT_TRUE(fails_with(
            [&] { net.call([&] { return chain.forward(chain.x); }); },
            {name,
             "another dtype",
             "expected Float, but got Double",
             "before it is sharded"}));
        expect_shards(chain, net);
      }
      convert(at::kFloat);
    });
  }
}

TEST(ReplacedContents, DtypeThatChangesBetweenForwardAndBackwardIsRefused) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    const auto rows = rows_of_rank(net.world());
    const auto loss = net.call([&] { return chain.loss(rows); });
    chain.layers[2]->to(at::kDouble);
    EXPECT_TRUE(fails_with(
        [&] { loss.backward(); }, {"'layer2.weight'", "another dtype"}));
    chain.layers[2]->to(at::kFloat);
    expect_shards(chain, net);
    for (auto& parameter : chain.parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
  });
}

TEST(ReplacedContents, ParametersAsOneVectorAndBack) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors*) {
    if (step == 1) {
      const torch::NoGradGuard no_grad;
      const auto vector =
          torch::nn::utils::parameters_to_vector(chain.parameters());
      torch::nn::utils::vector_to_parameters(vector * 0.5, chain.parameters());
    }
  };
  expect_same_training(training);
}

TEST(ReplacedContents, VectorOfAllParametersOutsideIsTheVectorOfShards) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const torch::NoGradGuard no_grad;
        const auto vector =
            torch::nn::utils::parameters_to_vector(chain.parameters());
        int64_t local = 0;
        for (const auto& unit : net.describe().units) {
          for (const auto& parameter : unit.parameters) {
            local += parameter.local_numel;
          }
        }
        EXPECT_EQ(vector.numel(), local);
        const auto whole = net.call([&] {
          return torch::nn::utils::parameters_to_vector(chain.parameters());
        });
        EXPECT_EQ(whole.numel(), 4 * (15 * 15 + 15));
      },
      split_strategies());
}

TEST(ReplacedContents, WholeVectorToParametersInARegion) {
  ChainTraining training;
  training.loss = [](Chain& chain, const Tensor& rows) {
    {
      const torch::NoGradGuard no_grad;
      const auto vector =
          torch::nn::utils::parameters_to_vector(chain.parameters());
      torch::nn::utils::vector_to_parameters(vector * 0.9, chain.parameters());
    }
    return chain.loss(rows);
  };
  expect_same_training(training);
}

TEST(ReplacedContents, InitialisationInARegion) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step != 1) {
      return;
    }
    const auto initialise = [&] {
      torch::nn::init::eye_(chain.weight(0));
      torch::nn::init::constant_(chain.bias(0), 0.5);
      const torch::NoGradGuard no_grad;
      chain.weight(1).copy_(fresh_values(0.5));
      chain.weight(2).copy_(chain.weight(1).t());
      chain.bias(3).fill_(0.125);
    };
    if (net != nullptr) {
      net->call(initialise);
    } else {
      initialise();
    }
  };
  expect_same_training(training);
}

TEST(ReplacedContents, RandomInitialisationInARegion) {
  // One rank: the default generator belongs to all threads.
  ChainTraining training;
  training.settings.world_sizes = {1};
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step != 1) {
      return;
    }
    const auto initialise = [&] {
      for (auto& layer : chain.layers) {
        torch::nn::init::orthogonal_(layer->weight);
        torch::nn::init::uniform_(layer->bias);
      }
    };
    torch::manual_seed(5);
    if (net != nullptr) {
      net->call(initialise);
    } else {
      initialise();
    }
  };
  expect_same_training(training);
}

TEST(ReplacedContents, CopiesOfWeightsLeaveARegion) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    std::vector<Tensor> copies;
    net.call([&] {
      for (const auto& parameter : chain.parameters()) {
        copies.push_back(parameter.detach().clone());
      }
    });
    const auto values = whole_values(net);
    for (size_t i = 0; i < copies.size(); ++i) {
      EXPECT_TRUE(at::equal(copies[i], values[i].second)) << i;
    }
  });
}

} // namespace
} // namespace fsdp::testing
