// Writes to whole weights inside of regions reach the shards, once.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Trains a chain that writes to weights before each forward pass. One slot:
/// each unit is let go and gathered again under way.
void expect_writes_train(const std::function<void(Chain&)>& write) {
  for (const int slots : {1, 4}) {
    ChainTraining training;
    training.settings.options.slots(slots);
    training.loss = [write](Chain& chain, const Tensor& rows) {
      write(chain);
      return chain.loss(rows);
    };
    expect_same_training(training);
  }
}

TEST(WrittenWeights, InPlaceWithoutAutograd) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    for (auto& layer : chain.layers) {
      layer->weight.clamp_(-0.2, 0.2);
      layer->weight.div_(layer->weight.norm(2, {1}, true));
      layer->bias.mul_(0.5).add_(0.01);
    }
  });
}

TEST(WrittenWeights, ThroughDetachAndData) {
  expect_writes_train([](Chain& chain) {
    for (auto& layer : chain.layers) {
      layer->weight.detach().mul_(0.9);
      layer->weight.data().add_(0.01);
      layer->bias.variable_data().sub_(0.01);
    }
  });
}

TEST(WrittenWeights, ThroughViews) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    chain.weight(0).t().select(0, 3).zero_();
    chain.weight(1).view({-1}).narrow(0, 60, 70).fill_(0.125);
    chain.weight(2).diagonal().copy_(torch::ones({15}));
    chain.weight(3).index_put_({torch::tensor({0, 14})}, torch::zeros({2, 15}));
    chain.bias(3).unsqueeze(0).mul_(0.5);
  });
}

TEST(WrittenWeights, ForeachAndOutVariants) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    at::_foreach_mul_(chain.parameters(), 0.9);
    at::add_out(chain.weight(1), chain.weight(2), chain.weight(3));
    at::_foreach_clamp_max_(chain.parameters(), 0.3);
  });
}

TEST(WrittenWeights, OfOneUnitFromAnother) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    chain.weight(0).copy_(chain.weight(3).t());
    chain.weight(1).lerp_(chain.weight(2), 0.25);
    chain.bias(0).add_(chain.bias(1)).add_(chain.bias(0));
  });
}

TEST(WrittenWeights, AreWrittenOnce) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    chain.weight(0).add_(0.01);
    for (int i = 0; i < 3; ++i) { // gathered and let go several times
      for (auto& layer : chain.layers) {
        layer->weight.sum();
      }
    }
    chain.weight(0).add_(0.01);
  });
}

TEST(WrittenWeights, BetweenForwardAndBackwardInOneRegion) {
  // After its last use: the graph does not need the old value.
  ChainTraining training;
  training.settings.options.slots(1);
  training.loss = [](Chain& chain, const Tensor& rows) {
    const auto loss = chain.loss(rows);
    const torch::NoGradGuard no_grad;
    chain.bias(2).mul_(0.5);
    return loss;
  };
  expect_same_training(training);
}

TEST(WrittenWeights, WriteThatTheGraphDoesNotExpectIsRefused) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    const auto old = whole_values(net)[4].second;
    const auto rows = rows_of_rank(net.world());
    const auto loss = net.call([&] {
      auto result = chain.loss(rows);
      const torch::NoGradGuard no_grad;
      chain.weight(2).mul_(0.5);
      return result;
    });
    EXPECT_TRUE(fails_with(
        [&] { loss.backward(); }, {"modified by an inplace operation"}));
    net.call([&] {
      const torch::NoGradGuard no_grad;
      chain.weight(2).copy_(old);
    });
  });
}

TEST(WrittenWeights, EmbeddingWithAMaximalNorm) {
  ParitySettings settings;
  settings.batch = Batch::kSame; // the rows decide what is written
  expect_same_training(
      [] {
        auto embedding = std::make_shared<torch::nn::Embedding>(
            torch::nn::EmbeddingOptions(10, 16).max_norm(1.0));
        auto head = torch::nn::Linear(16, 10);
        return TestModel{
            {{"embedding", {{"embedding.weight", (*embedding)->weight}}},
             {"head",
              {{"head.weight", head->weight}, {"head.bias", head->bias}}}},
            [embedding, head](const Tensor& rows) mutable {
              const auto words = rows % 7;
              return torch::nn::functional::cross_entropy(
                  head(embedding->get()->forward(words)), words);
            },
            embedding};
      },
      settings);
}

TEST(WrittenWeights, InEvaluationReachTheShards) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step != 1) {
      return;
    }
    const auto write = [&] {
      const torch::NoGradGuard no_grad;
      chain.forward(chain.x);
      chain.weight(1).mul_(0.5);
      return chain.forward(chain.x);
    };
    if (net != nullptr) {
      net->call(write);
    } else {
      write();
    }
  };
  expect_same_training(training);
}

TEST(WrittenWeights, ReachUnitsThatStayWhole) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step == 1 && net != nullptr) {
      net->unshard();
    }
    if (step == 2) {
      const auto write = [&] {
        const torch::NoGradGuard no_grad;
        chain.weight(1).mul_(0.5);
      };
      if (net != nullptr) {
        net->call(write);
      } else {
        write();
      }
    }
  };
  expect_same_training(training);
}

TEST(WrittenWeights, OnlyWhatWasWrittenLosesTheBitsOfTheComputeType) {
  for (const int world_size : {1, 2, 3}) {
    run_as_threads(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          auto expected = chain->weight(1).detach().clone();
          ShardedTensors net(
              chain->units(),
              world,
              Options().mixed_precision({.param_dtype = at::kBFloat16}));
          net.call([&] {
            const torch::NoGradGuard no_grad;
            chain->weight(1).select(0, 5).mul_(0.3);
          });
          const torch::NoGradGuard no_grad;
          auto row = expected.select(0, 5);
          row.copy_(row.to(at::kBFloat16).mul_(0.3).to(at::kFloat));
          const auto parts = net.world().communicator().exchange(
              std::to_string(chain->weight(1).numel()), "parts");
          int64_t begin = 0;
          for (int rank = 0; rank < world.rank(); ++rank) {
            begin += std::stol(parts[rank]);
          }
          EXPECT_TRUE(at::equal(
              chain->weight(1).detach(),
              expected.flatten().narrow(0, begin, chain->weight(1).numel())));
        },
        kWaitLimit);
  }
}

} // namespace
} // namespace fsdp::testing
