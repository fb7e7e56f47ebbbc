#include "harness/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace fsdp::testing {

namespace {

TestProgram build_program(const MakeProgram& make) {
  TestProgram program;
  build([&] {
    program = make();
    return TestModel{};
  });
  return program;
}

Training run_unsharded(
    const MakeProgram& make,
    const ParitySettings& settings) {
  const auto program = build_program(make);
  Trial run(program.units, rows_of_rank(World(), settings.batch), nullptr);
  program.body(run);
  return std::move(run.records());
}

/// The records of the ranks that run in this process, by rank.
std::map<int, Training> run_sharded(
    const MakeProgram& make,
    const ParitySettings& settings,
    int world_size,
    Strategy strategy) {
  return results_of_ranks(
      world_size,
      [&](const World& world) {
        const auto program = build_program(make);
        auto options = settings.options;
        options.strategy(strategy);
        options.shard_size(std::max(world.size() / 2, 1));
        ShardedTensors net(program.units, world, options);
        Trial run(program.units, rows_of_rank(world, settings.batch), &net);
        program.body(run);
        return std::move(run.records());
      },
      std::chrono::seconds(30));
}

} // namespace

at::Tensor join_shards(
    const World& world,
    const at::Tensor& shard,
    at::IntArrayRef whole_sizes) {
  const torch::NoGradGuard no_grad;
  const auto flat = shard.detach().contiguous();
  const auto parts = world.communicator().exchange(
      {static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()},
      "shards of a test");
  std::string bytes;
  for (const auto& part : parts) {
    bytes += part;
  }
  auto whole = torch::empty(whole_sizes, shard.scalar_type());
  while (bytes.size() > whole.nbytes() && whole.nbytes() > 0) {
    // Replicas of the groups before.
    const auto end = bytes.size() - whole.nbytes();
    TORCH_CHECK(
        bytes.compare(end, whole.nbytes(), bytes, 0, whole.nbytes()) == 0,
        "the replicas of a group of ranks differ");
    bytes.resize(end);
  }
  TORCH_CHECK(
      bytes.size() == whole.nbytes(),
      "shards of ",
      bytes.size(),
      " bytes, expected ",
      whole.nbytes());
  if (!bytes.empty()) {
    std::memcpy(whole.data_ptr(), bytes.data(), bytes.size());
  }
  return whole;
}

Trial::Trial(const NamedUnits& units, at::Tensor rows, ShardedTensors* net)
    : rows_(std::move(rows)),
      net_(net) {
  for (const auto& [name, tensor] : tensors_of(units)) {
    named_.emplace_back(name, tensor);
    parameters_.push_back(tensor);
    sizes_.push_back(
        net == nullptr ? tensor.sizes().vec() : net->full_sizes(name));
  }
}

void Trial::record(const std::string& what, const at::Tensor& value) {
  const torch::NoGradGuard no_grad;
  records_.parameters.emplace_back(
      what + " (record " + std::to_string(records_.parameters.size()) + ")",
      value.detach().clone());
}

void Trial::record(const std::string& what, double value) {
  record(what, torch::tensor(value, torch::kDouble));
}

void Trial::record_mean(const std::string& what, const at::Tensor& value) {
  if (net_ == nullptr) {
    record(what, value);
    return;
  }
  const auto& world = net_->world();
  const auto mine = value.detach().unsqueeze(0);
  auto sizes = value.sizes().vec();
  sizes.insert(sizes.begin(), world.size());
  record(what, join_shards(world, mine, sizes).mean(0));
}

at::Tensor Trial::whole_gradient(const at::Tensor& parameter, size_t index) {
  const auto& gradient = parameter.grad();
  if (net_ == nullptr ||
      net_->describe().units.front().strategy == Strategy::kNoShard) {
    return gradient;
  }
  return join_shards(net_->world(), gradient, sizes_.at(index));
}

void Trial::record_gradients(const std::string& when) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = named_[i];
    const auto what = "gradient of " + name + " " + when;
    const bool present = parameter.grad().defined();
    record(what + ": present", present ? 1.0 : 0.0);
    if (present) {
      record(what, whole_gradient(parameter, i));
    }
  }
}

void Trial::record_parameters(const std::string& when) {
  if (net_ == nullptr) {
    for (const auto& [name, parameter] : named_) {
      record("parameter " + name + " " + when, parameter);
    }
    return;
  }
  auto values = whole_values(*net_);
  for (const auto& [name, parameter] : named_) { // in the order of the units
    for (const auto& [other, value] : values) {
      if (other == name) {
        record("parameter " + name + " " + when, value);
      }
    }
  }
}

void Trial::step(double learning_rate) {
  torch::optim::SGD optimizer(
      parameters_, torch::optim::SGDOptions(learning_rate));
  optimizer.step();
  optimizer.zero_grad();
}

void expect_same_program(
    const MakeProgram& make,
    const ParitySettings& settings) {
  const auto expected = run_unsharded(make, settings);
  ASSERT_FALSE(expected.parameters.empty()) << "nothing is recorded";
  for (const int world_size : settings.world_sizes) {
    std::map<int, Training> first;
    for (const auto strategy : settings.strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      std::map<int, Training> actual;
      ASSERT_NO_THROW(
          actual = run_sharded(make, settings, world_size, strategy));
      for (const auto& [rank, records] : actual) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_same(expected, records, settings);
        expect_identical(
            first.try_emplace(rank, records).first->second, records);
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
    if (settings.hybrid && world_size % 2 == 0) { // sums have another order
      SCOPED_TRACE("hybrid, world size " + std::to_string(world_size));
      std::map<int, Training> actual;
      ASSERT_NO_THROW(
          actual =
              run_sharded(make, settings, world_size, Strategy::kHybridShard));
      for (const auto& [rank, records] : actual) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_same(expected, records, settings);
      }
    }
  }
}

void in_worlds(
    const std::vector<int>& world_sizes,
    const std::vector<Strategy>& strategies,
    const std::function<void(const World&, Strategy)>& body) {
  for (const int world_size : world_sizes) {
    for (const auto strategy : strategies) {
      const auto where = "strategy " +
          std::to_string(static_cast<int>(strategy)) + ", world size " +
          std::to_string(world_size);
      SCOPED_TRACE(where);
      ASSERT_NO_THROW(run_ranks(
          world_size,
          [&](const World& world) {
            SCOPED_TRACE(where + ", rank " + std::to_string(world.rank()));
            body(world, strategy);
          },
          std::chrono::seconds(20)));
    }
  }
}

} // namespace fsdp::testing
