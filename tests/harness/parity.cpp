#include "harness/parity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <unordered_set>

namespace fsdp::testing {

namespace {

std::mutex& build_mutex() {
  static std::mutex mutex;
  return mutex;
}

} // namespace

at::Tensor rows_of_rank(const World& world, Batch batch) {
  if (batch == Batch::kSame || kRows % world.size() != 0) {
    return torch::arange(kRows);
  }
  const auto share = kRows / world.size();
  return torch::arange(world.rank() * share, (world.rank() + 1) * share);
}

std::vector<std::pair<std::string, at::Tensor>> tensors_of(
    const NamedUnits& units) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [unit, named] : units) {
    for (const auto& [name, tensor] : named) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        tensors.emplace_back(name, tensor);
      }
    }
  }
  return tensors;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::vector<at::Tensor>& parameters,
    const ParitySettings& settings) {
  std::vector<at::Tensor> trained;
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) {
      trained.push_back(parameter);
    }
  }
  if (settings.optimizer == Optimizer::kSgd) {
    return std::make_unique<torch::optim::SGD>(
        trained,
        torch::optim::SGDOptions(settings.learning_rate).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      trained, torch::optim::AdamWOptions(settings.learning_rate).eps(1e-4));
}

TestModel build(const MakeModel& make) {
  const std::lock_guard lock(build_mutex());
  at::set_num_threads(1); // in this thread: ranks share few cores
  torch::manual_seed(1);
  return make();
}

double mean_over_ranks(const World& world, double value) {
  world.communicator()
      .all_reduce(
          {reinterpret_cast<std::byte*>(&value), sizeof(value)},
          DType::kFloat64,
          ReduceOp::kSum,
          "mean of a test")
      ->wait();
  return value / world.size();
}

std::vector<std::pair<std::string, at::Tensor>> whole_values(
    ShardedModule& net) {
  std::vector<std::pair<std::string, at::Tensor>> values;
  const auto whole = net.whole_parameters();
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : net.named_parameters()) {
    values.emplace_back(name, tensor.detach().clone());
  }
  return values;
}

std::vector<std::pair<std::string, at::Tensor>> values_at_rest(
    ShardedModule& net) {
  std::unordered_set<std::string> replicated;
  for (const auto& unit : net.describe().units) {
    for (const auto& parameter : unit.parameters) {
      if (unit.strategy == Strategy::kNoShard) {
        replicated.insert(parameter.names.front());
      }
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> values;
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : net.named_parameters()) {
    const auto mine = tensor.detach();
    auto& value = values.emplace_back(name, mine.clone()).second;
    if (replicated.contains(name)) {
      continue;
    }
    value = at::empty(net.full_sizes(name), mine.scalar_type());
    auto* const begin = static_cast<char*>(value.data_ptr());
    auto* const end = begin + value.nbytes();
    auto* place = begin;
    for (const auto& shard : net.world().communicator().exchange(
             {static_cast<const char*>(mine.data_ptr()), mine.nbytes()},
             "shards of '" + name + "'")) {
      if (place == end && !shard.empty()) { // replicas of what is there follow
        place = begin;
      }
      if (shard.size() > static_cast<size_t>(end - place)) {
        ADD_FAILURE() << "too many elements of " << name;
        return values;
      }
      place = std::copy(shard.begin(), shard.end(), place);
    }
    EXPECT_EQ(place, end);
  }
  return values;
}

Training train_unsharded(
    const MakeModel& make,
    const ParitySettings& settings) {
  const auto model = build(make);
  const auto tensors = tensors_of(model.units);
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : tensors) {
    parameters.push_back(tensor);
  }
  const auto optimizer = make_optimizer(parameters, settings);
  Training training;
  for (int step = 0; step < settings.steps; ++step) {
    auto loss = model.loss(torch::arange(kRows));
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    training.losses.push_back(loss.item<double>());
  }
  for (const auto& [name, tensor] : tensors) {
    training.parameters.emplace_back(name, tensor.detach().clone());
  }
  return training;
}

std::map<int, Training> train_sharded(
    const MakeModel& make,
    const ParitySettings& settings,
    int world_size,
    Strategy strategy) {
  return results_of_ranks(
      world_size,
      [&](const World& world) {
        const auto model = build(make);
        auto options = settings.options;
        options.strategy(strategy);
        options.shard_size(std::max(world.size() / 2, 1));
        ShardedTensors net(model.units, world, options);
        const auto optimizer = make_optimizer(net.parameters(), settings);
        const auto rows = rows_of_rank(world, settings.batch);
        Training training;
        for (int step = 0; step < settings.steps; ++step) {
          auto loss = net.call([&] { return model.loss(rows); });
          loss.backward();
          optimizer->step();
          optimizer->zero_grad();
          training.losses.push_back(
              mean_over_ranks(world, loss.item<double>()));
        }
        training.parameters = options.mixed_precision().param_dtype.has_value()
            ? values_at_rest(net)
            : whole_values(net);
        return training;
      },
      std::chrono::seconds(30));
}

::testing::AssertionResult all_close(
    const at::Tensor& actual,
    const at::Tensor& expected,
    double relative,
    double absolute) {
  const torch::NoGradGuard no_grad;
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure()
        << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  if (actual.scalar_type() != expected.scalar_type()) {
    return ::testing::AssertionFailure()
        << "dtype " << actual.scalar_type() << ", expected "
        << expected.scalar_type();
  }
  if (actual.numel() == 0) {
    return ::testing::AssertionSuccess();
  }
  const auto widen = [](const at::Tensor& tensor) {
    return tensor.is_complex() ? at::view_as_real(tensor).to(at::kDouble)
                               : tensor.to(at::kDouble);
  };
  const auto a = widen(actual.detach());
  const auto e = widen(expected.detach());
  const auto largest = e.abs().max().item<double>();
  const auto error = (a - e).abs().max().item<double>();
  if (error <= relative * largest + absolute) { // false for NaN
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
      << "off by up to " << error << " where values are up to " << largest;
}

void expect_same(
    const Training& expected,
    const Training& actual,
    const ParitySettings& settings) {
  ASSERT_EQ(expected.losses.size(), actual.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(
        expected.losses[i],
        actual.losses[i],
        settings.loss_tolerance * std::abs(expected.losses[i]) + 1e-12)
        << "loss of step " << i;
  }
  ASSERT_EQ(expected.parameters.size(), actual.parameters.size());
  for (const auto& [name, value] : expected.parameters) {
    const auto found = std::find_if(
        actual.parameters.begin(), actual.parameters.end(), [&](auto& each) {
          return each.first == name;
        });
    ASSERT_NE(found, actual.parameters.end()) << name;
    if (std::find(settings.skip.begin(), settings.skip.end(), name) ==
        settings.skip.end()) {
      EXPECT_TRUE(
          all_close(found->second, value, settings.parameter_tolerance, 1e-8))
          << "parameter " << name;
    }
  }
}

void expect_identical(const Training& expected, const Training& actual) {
  EXPECT_EQ(expected.losses, actual.losses);
  ASSERT_EQ(expected.parameters.size(), actual.parameters.size());
  for (size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_EQ(expected.parameters[i].first, actual.parameters[i].first);
    EXPECT_TRUE(
        at::equal(expected.parameters[i].second, actual.parameters[i].second))
        << "bits of parameter " << expected.parameters[i].first;
  }
}

void expect_same_training(
    const MakeModel& make,
    const ParitySettings& settings) {
  expect_same_training_as(train_unsharded(make, settings), make, settings);
}

void expect_same_training_as(
    const Training& expected,
    const MakeModel& make,
    const ParitySettings& settings) {
  for (const int world_size : settings.world_sizes) {
    std::map<int, Training> first;
    for (const auto strategy : settings.strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      std::map<int, Training> actual;
      ASSERT_NO_THROW(
          actual = train_sharded(make, settings, world_size, strategy));
      for (auto& [rank, training] : actual) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_same(expected, training, settings);
        expect_identical(
            first.try_emplace(rank, training).first->second, training);
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
    if (settings.hybrid && world_size % 2 == 0) {
      SCOPED_TRACE("hybrid, world size " + std::to_string(world_size));
      std::map<int, Training> actual;
      ASSERT_NO_THROW(
          actual = train_sharded(
              make, settings, world_size, Strategy::kHybridShard));
      for (auto& [rank, training] : actual) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_same(expected, training, settings);
      }
    }
  }
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

} // namespace fsdp::testing
