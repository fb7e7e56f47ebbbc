#pragma once

#include "harness/parity.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp::testing {

using NamedValues = std::vector<std::pair<std::string, at::Tensor>>;

/// results_of_ranks(), or run_ranks() where there are none; an exception of a
/// rank is a failure.
template <class F>
auto on_ranks(
    int size,
    F&& rank_main,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const auto traced = [&](const World& world) {
    SCOPED_TRACE(
        "rank " + std::to_string(world.rank()) + "/" +
        std::to_string(world.size()));
    return rank_main(world);
  };
  using Result = std::invoke_result_t<F&, const World&>;
  if constexpr (std::is_void_v<Result>) {
    EXPECT_NO_THROW(run_ranks(size, traced, timeout));
  } else {
    std::map<int, Result> results;
    EXPECT_NO_THROW(results = results_of_ranks(size, traced, timeout));
    return results;
  }
}

/// Makes a module with a fixed seed, one thread at a time (all threads share
/// the default generator).
std::mutex& build_lock();
template <class Make>
auto seeded(Make&& make, uint64_t seed = 1) {
  const std::lock_guard lock(build_lock());
  torch::manual_seed(seed);
  return make();
}

/// Numbers without a pattern, of the default type, the same in every call.
at::Tensor wave(at::IntArrayRef sizes, double frequency = 0.7);

/// The gradients of all parameters by name: whole, undefined where no rank has
/// one. Fails when only some ranks have one, or when replicas differ in bits.
/// Collective.
NamedValues whole_gradients(ShardedModule& net);

bool contains(const std::string& text, const std::string& part);

/// The parameters of a module by name, each once: Module::named_parameters
/// lists a tied one under every name.
NamedValues distinct_parameters(const torch::nn::Module& module);
std::vector<at::Tensor> tensors_of(const NamedValues& values);

/// A module without sharding, behind the interface of FullyShardedDataParallel:
/// one generic lambda can train both.
template <class M>
class Plain {
 public:
  explicit Plain(std::shared_ptr<M> module) : module_(std::move(module)) {}

  template <class... A>
  decltype(auto) operator()(A&&... arguments) {
    return module_->forward(std::forward<A>(arguments)...);
  }
  template <class F, class... A>
  decltype(auto) call(F&& function, A&&... arguments) {
    return std::invoke(
        std::forward<F>(function), *module_, std::forward<A>(arguments)...);
  }
  M* operator->() const { return module_.get(); }
  std::vector<at::Tensor> parameters() const {
    return tensors_of(distinct_parameters(*module_));
  }
  std::shared_ptr<int> no_sync() { return nullptr; }
  std::shared_ptr<int> region() { return nullptr; }
  void average_ignored_gradients() {}
  double clip_grad_norm_(double max_norm, double norm_type = 2.0) {
    return torch::nn::utils::clip_grad_norm_(parameters(), max_norm, norm_type);
  }
  void clip_grad_value_(double value) {
    torch::nn::utils::clip_grad_value_(parameters(), value);
  }

 private:
  std::shared_ptr<M> module_;
};

template <class M>
NamedValues values_of(Plain<M>& net) {
  NamedValues values;
  for (const auto& [name, tensor] : distinct_parameters(*net.operator->())) {
    values.emplace_back(name, tensor.detach().clone());
  }
  return values;
}
inline NamedValues values_of(ShardedModule& net) {
  return whole_values(net);
}

template <class M>
NamedValues gradients_of(Plain<M>& net) {
  NamedValues values;
  for (const auto& [name, tensor] : distinct_parameters(*net.operator->())) {
    const auto& grad = tensor.grad();
    values.emplace_back(name, grad.defined() ? grad.clone() : grad);
  }
  return values;
}
inline NamedValues gradients_of(ShardedModule& net) {
  return whole_gradients(net);
}

/// What a program saw: compared between the sharded and the plain run.
class Log {
 public:
  explicit Log(World world) : world_(std::move(world)) {}

  const World& world() const { return world_; }

  /// This rank's rows of the global batch of kRows.
  at::Tensor rows() const;
  at::Tensor mine(const at::Tensor& batch) const {
    return batch.index_select(0, rows());
  }

  /// A loss that is a mean over this rank's rows. Collective.
  void loss(const at::Tensor& value);

  /// Something that all ranks know.
  void value(std::string label, const at::Tensor& tensor);
  void value(std::string label, double number) {
    value(std::move(label), torch::tensor(number, torch::kDouble));
  }

  /// Whole parameters and gradients, by name. Collective.
  template <class N>
  void parameters(N& net) {
    add_sorted("parameter ", values_of(net));
  }
  template <class N>
  void gradients(N& net) {
    add_sorted("gradient of ", gradients_of(net));
  }

  const NamedValues& values() const { return values_; }

 private:
  void add_sorted(const std::string& kind, NamedValues values);

  World world_;
  NamedValues values_;
};

/// Where it is a whole number.
std::vector<int64_t> half_of_the_ranks(int world_size);
std::vector<int64_t> all_shard_sizes(int world_size);

struct ProgramSettings {
  std::vector<int> world_sizes = {1, 2, 3, 4};
  std::vector<Strategy> strategies = {
      Strategy::kFullShard,
      Strategy::kShardGradOp,
      Strategy::kShardOptimizer,
      Strategy::kNoShard};
  /// Also hybrid, for each of these numbers of ranks per group. Sums have
  /// another order then, so bits are compared among these strategies alone.
  std::vector<Strategy> hybrid_strategies = {Strategy::kHybridShard};
  std::vector<int64_t> (*shard_sizes)(int world_size) = half_of_the_ranks;
  Options options;
  /// Models compute in this type. In float64 a tolerance can be so small that
  /// no difference hides behind rounding.
  at::ScalarType type = at::kDouble;
  double tolerance = 1e-11; // of a tensor's largest value, plus a hundredth
  /// Whether strategies agree bit for bit. Not when a norm is involved, which
  /// is a sum in another order.
  bool same_bits = true;
  std::vector<std::string> skip; // labels that are not compared
};

void expect_same_log(
    const Log& expected,
    const Log& actual,
    const ProgramSettings& settings);
void expect_same_bits(const NamedValues& expected, const NamedValues& actual);

/// Sets the type of what factories make, in all threads, while it lives.
class DefaultType {
 public:
  explicit DefaultType(at::ScalarType type)
      : previous_(torch::get_default_dtype()) {
    torch::set_default_dtype(c10::scalarTypeToTypeMeta(type));
  }
  ~DefaultType() { torch::set_default_dtype(previous_); }
  DefaultType(const DefaultType&) = delete;
  DefaultType& operator=(const DefaultType&) = delete;

 private:
  caffe2::TypeMeta previous_;
};

/// Runs `program(net, log)` sharded in one world with each of `strategies`.
template <class Make, class Program>
void expect_sharded_program(
    const Make& make,
    const Program& program,
    const ProgramSettings& settings,
    const Log& expected,
    int size,
    const std::vector<Strategy>& strategies,
    int64_t shard_size) {
  std::map<int, NamedValues> first; // by rank
  for (const auto strategy : strategies) {
    SCOPED_TRACE(
        "strategy " + std::to_string(static_cast<int>(strategy)) +
        ", world size " + std::to_string(size) + ", shard size " +
        std::to_string(shard_size));
    const auto logs = on_ranks(size, [&](const World& world) {
      auto options = settings.options;
      options.strategy(strategy).shard_size(shard_size);
      FullyShardedDataParallel net(seeded(make), world, options);
      Log log(world);
      program(net, log);
      expect_same_log(expected, log, settings);
      return log.values();
    });
    if (::testing::Test::HasFailure()) {
      return;
    }
    for (const auto& [rank, log] : logs) {
      const auto& same = first.try_emplace(rank, log).first->second;
      if (settings.same_bits) {
        expect_same_bits(same, log);
      }
    }
  }
}

/// Runs `program(net, log)` with the plain module, and sharded in all worlds
/// and strategies of `settings`, and expects the same log on every rank.
template <class Make, class Program>
void expect_same_program(
    const Make& make,
    const Program& program,
    const ProgramSettings& settings = {}) {
  const DefaultType type(settings.type);
  Log expected{World()};
  auto module = seeded(make);
  Plain plain(module);
  program(plain, expected);
  const auto run = [&](int size, const auto& strategies, int64_t shard_size) {
    if (!::testing::Test::HasFailure()) {
      expect_sharded_program(
          make, program, settings, expected, size, strategies, shard_size);
    }
  };
  for (const int size : settings.world_sizes) {
    run(size, settings.strategies, size);
    for (const auto shard_size : settings.shard_sizes(size)) {
      run(size, settings.hybrid_strategies, shard_size);
    }
  }
}

} // namespace fsdp::testing
