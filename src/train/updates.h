#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace torch::optim {
class OptimizerParamGroup;
}

namespace fsdp::detail {

class FlatGroup;

/// One parameter that a step of an optimizer changes.
struct Update {
  at::Tensor parameter;
  at::Tensor gradient;
  FlatGroup* group = nullptr; // whose shard it is; null: an ordinary tensor
  /// Where the optimizer keeps its state of it; undefined tensors at first.
  c10::SmallVector<at::Tensor*, 3> state;
  int64_t steps = 0; // the step that this is, from 1
};

/// The parameters of `params` that have a gradient. Throws for what `optimizer`
/// (its name, for messages) cannot update; changes nothing.
std::vector<Update> updates_of(
    const char* optimizer,
    const torch::optim::OptimizerParamGroup& params);

/// Throws when state `name` has another shape or dtype than the parameter.
void check_state(
    const char* optimizer,
    const char* name,
    const at::Tensor& state,
    const at::Tensor& parameter);

/// Tells the nets that the shards among `updates` are written now, and waits
/// until no other rank reads them.
void announce_writes(const std::vector<std::vector<Update>>& updates);

/// Takes the first update of each parameter out of `updates`, in the order in
/// which shards lie in memory. A program may list a parameter twice; as in
/// libtorch that makes two updates, one after the other.
std::vector<Update> take_distinct(std::vector<Update>& updates);

} // namespace fsdp::detail
