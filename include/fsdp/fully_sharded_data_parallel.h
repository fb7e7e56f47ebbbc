#pragma once

#include <fsdp/export.h>
#include <fsdp/sharded_module.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

/// A module of type `M`, sharded over the ranks of a world.
///
///   fsdp::FullyShardedDataParallel net(
///       model, world, fsdp::Options().units(fsdp::each<Block>()));
///   torch::optim::AdamW optimizer(net.parameters(), 3e-4);
///   auto loss = torch::mse_loss(net(x), y);
///   loss.backward();
///   optimizer.step();
///
/// The model and the loop stay as they are; only the forward call goes through
/// `net`. Gradients are the mean over the ranks when backward() returns. The
/// optimizer may be made before or after (Adagrad, which makes its state at
/// once, after).
///
/// Collective: construction, calls of the net and backward passes. All ranks
/// build the same model and use its units in the same order.
template <class M>
class FullyShardedDataParallel : public ShardedModule {
  static_assert(
      !std::is_same_v<M, torch::nn::Module>,
      "forward of torch::nn::Module is not virtual: give the concrete type of "
      "the"
      " module");

 public:
  explicit FullyShardedDataParallel(
      std::shared_ptr<M> module,
      World world = {},
      const Options& options = {})
      : module_(std::move(module)) {
    shard_module(module_, std::move(world), options);
  }

  FullyShardedDataParallel(
      const torch::nn::ModuleHolder<M>& holder,
      World world = {},
      const Options& options = {})
      : FullyShardedDataParallel(holder.ptr(), std::move(world), options) {}

  /// module->forward(arguments...) in a region. Brace lists cannot be
  /// forwarded: for forward({a, b}) use call().
  template <class... A>
  decltype(auto) operator()(A&&... arguments) {
    return in_region([&]() -> decltype(auto) {
      return module_->forward(std::forward<A>(arguments)...);
    });
  }

  /// Another method, net.call(&M::encode, x), or any code,
  /// net.call([&](M& module) { ... }), in a region.
  template <class F, class... A>
  decltype(auto) call(F&& function, A&&... arguments) {
    return in_region([&]() -> decltype(auto) {
      return std::invoke(
          std::forward<F>(function), *module_, std::forward<A>(arguments)...);
    });
  }

  /// The module, for train(), eval(), named_parameters() and the like. Its
  /// forward does not open a region and would find shards, which is an error.
  M* operator->() const { return module_.get(); }
  const std::shared_ptr<M>& module() const { return module_; }

  /// See unwrap() below.
  std::shared_ptr<M> release_module() && {
    unwrap_parameters();
    return std::move(module_);
  }

 private:
  std::shared_ptr<M> module_;
};

/// Gives the plain module back, with whole parameters (and no gradients) on
/// every rank. Collective.
template <class M>
std::shared_ptr<M> unwrap(FullyShardedDataParallel<M>&& net) {
  return std::move(net).release_module();
}

/// Parameters that do not belong to a torch::nn::Module, for instance those of
/// a torch::jit::Module or of a struct of tensors.
class FSDP_API ShardedTensors : public ShardedModule {
 public:
  using NamedTensors = ShardedModule::NamedTensors;
  using NamedUnits = ShardedModule::NamedUnits;

  /// `units`: name and tensors of each unit. Options::units and ignore must be
  /// empty.
  explicit ShardedTensors(
      NamedUnits units,
      World world = {},
      const Options& options = {}) {
    shard_tensors(std::move(units), std::move(world), options);
  }

  /// Runs `function` in a region.
  template <class F>
  decltype(auto) call(F&& function) {
    return in_region(std::forward<F>(function));
  }
};

} // namespace fsdp
