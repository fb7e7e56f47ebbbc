#pragma once

#include <fsdp/export.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/options.h>

#include <memory>
#include <utility>

namespace fsdp {

namespace detail {
FSDP_API void mark_unit(
    const std::shared_ptr<torch::nn::Module>& module,
    const UnitOptions& options);
} // namespace detail

/// Marks `module` as a unit of the net that a later call makes of a module
/// above it, as an alternative to Options::units: first the blocks, then the
/// root.
///
///   for (auto& block : *model->blocks) {
///     fsdp::fully_shard(block);
///   }
///   auto net = fsdp::fully_shard(model, world);
///
/// Nothing is sharded before the call with a world, so the order in which
/// blocks are marked does not matter. Throws when the module is marked already.
/// A mark is forgotten with its module.
template <class M>
void fully_shard(
    const std::shared_ptr<M>& module,
    const UnitOptions& options = {}) {
  detail::mark_unit(module, options);
}
template <class M>
void fully_shard(
    const torch::nn::ModuleHolder<M>& holder,
    const UnitOptions& options = {}) {
  detail::mark_unit(holder.ptr(), options);
}

/// Shards `module`: the units are the marked modules and those that
/// Options::units chooses. Collective.
template <class M>
[[nodiscard]] FullyShardedDataParallel<M> fully_shard(
    const std::shared_ptr<M>& module,
    World world,
    const Options& options = {}) {
  return FullyShardedDataParallel<M>(module, std::move(world), options);
}
template <class M>
[[nodiscard]] FullyShardedDataParallel<M> fully_shard(
    const torch::nn::ModuleHolder<M>& holder,
    World world,
    const Options& options = {}) {
  return FullyShardedDataParallel<M>(holder, std::move(world), options);
}

} // namespace fsdp
