#include "harness/chain.h"

#include <map>

namespace fsdp::testing {

Chain::Chain(int count, int64_t width) {
  for (int i = 0; i < count; ++i) {
    layers.emplace_back(width, width);
  }
  x = torch::randn({kRows, width});
}

NamedUnits Chain::units() const {
  NamedUnits result;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto name = "layer" + std::to_string(i);
    result.push_back(
        {name,
         {{name + ".weight", layers[i]->weight},
          {name + ".bias", layers[i]->bias}}});
  }
  return result;
}

std::vector<at::Tensor> Chain::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& layer : layers) {
    tensors.push_back(layer->weight);
    tensors.push_back(layer->bias);
  }
  return tensors;
}

at::Tensor Chain::forward(at::Tensor y) {
  for (auto& layer : layers) {
    y = torch::tanh(layer->forward(y));
  }
  return y;
}

at::Tensor Chain::loss(const at::Tensor& rows) {
  return forward(x.index_select(0, rows)).pow(2).mean();
}

std::shared_ptr<Chain> build_chain(int count, int64_t width) {
  const auto model = build([&] {
    TestModel result;
    result.owner = std::make_shared<Chain>(count, width);
    return result;
  });
  return std::static_pointer_cast<Chain>(model.owner);
}

MakeModel chain_with(ChainLoss loss) {
  return [loss = std::move(loss)] {
    const auto owner = std::make_shared<Chain>();
    return TestModel{
        owner->units(),
        [owner, loss](const at::Tensor& rows) { return loss(*owner, rows); },
        owner};
  };
}

namespace {

std::unique_ptr<torch::optim::Optimizer> make_chain_optimizer(
    const Chain& chain,
    const ParitySettings& settings) {
  if (settings.optimizer == Optimizer::kSgd) {
    return std::make_unique<torch::optim::SGD>(
        chain.parameters(),
        torch::optim::SGDOptions(settings.learning_rate).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      chain.parameters(),
      torch::optim::AdamWOptions(settings.learning_rate).eps(1e-4));
}

Training train_chain_unsharded(const ChainTraining& training) {
  const auto chain = build_chain();
  training.before_step(-1, *chain, nullptr);
  const auto optimizer = make_chain_optimizer(*chain, training.settings);
  Training result;
  for (int step = 0; step < training.settings.steps; ++step) {
    training.before_step(step, *chain, nullptr);
    auto loss = training.loss(*chain, torch::arange(kRows));
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& [unit, tensors] : chain->units()) {
    for (const auto& [name, tensor] : tensors) {
      result.parameters.emplace_back(name, tensor.detach().clone());
    }
  }
  return result;
}

Training train_chain_sharded(
    const ChainTraining& training,
    const World& world,
    Strategy strategy) {
  const auto& settings = training.settings;
  const auto chain = build_chain();
  training.before_step(-1, *chain, nullptr);
  auto options = settings.options;
  options.strategy(strategy);
  ShardedTensors net(chain->units(), world, options);
  const auto optimizer = make_chain_optimizer(*chain, settings);
  const auto rows = rows_of_rank(world, settings.batch);
  Training result;
  for (int step = 0; step < settings.steps; ++step) {
    training.before_step(step, *chain, &net);
    auto loss = net.call([&] { return training.loss(*chain, rows); });
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    result.losses.push_back(mean_over_ranks(world, loss.item<double>()));
  }
  result.parameters = whole_values(net);
  return result;
}

} // namespace

void expect_same_training(const ChainTraining& training) {
  const auto& settings = training.settings;
  const auto expected = train_chain_unsharded(training);
  for (const int world_size : settings.world_sizes) {
    std::map<int, Training> first; // by rank
    for (const auto strategy : settings.strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      std::map<int, Training> actual;
      const auto rank_main = [&](const World& world) {
        return train_chain_sharded(training, world, strategy);
      };
      ASSERT_NO_THROW(
          actual = results_of_ranks(world_size, rank_main, kWaitLimit));
      for (auto& [rank, result] : actual) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_same(expected, result, settings);
        expect_identical(first.try_emplace(rank, result).first->second, result);
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
  }
}

void expect_undisturbed(
    const std::function<void(Chain& chain, ShardedTensors& net)>& event,
    const ParitySettings& settings) {
  ChainTraining training;
  training.settings = settings;
  training.before_step = [&](int step, Chain& chain, ShardedTensors* net) {
    if (step == 1 && net != nullptr) {
      event(chain, *net);
    }
  };
  expect_same_training(training);
}

ParitySettings split_strategies() {
  ParitySettings settings;
  settings.strategies = {Strategy::kFullShard, Strategy::kShardGradOp};
  return settings;
}

::testing::AssertionResult fails_with(
    const std::function<void()>& call,
    const std::vector<std::string>& parts) {
  const auto text = error_of(call);
  if (text.empty()) {
    return ::testing::AssertionFailure() << "no exception";
  }
  for (const auto& part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure()
          << "no \"" << part << "\" in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

} // namespace fsdp::testing
