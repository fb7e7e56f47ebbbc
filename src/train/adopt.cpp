#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/net.h"

#include <fsdp/sharded_module.h>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

namespace fsdp {

namespace {

namespace optim = torch::optim;

/// A tensor that an optimizer keeps of a parameter, with one element each.
struct StateTensor {
  const char* name;
  at::Tensor* tensor;
};

/// Of the optimizers of libtorch; throws for other classes.
std::vector<StateTensor> tensors_of(optim::OptimizerParamState& state) {
  const auto moments = [](auto& adam) -> std::vector<StateTensor> {
    return {
        {"exp_avg", &adam.exp_avg()},
        {"exp_avg_sq", &adam.exp_avg_sq()},
        {"max_exp_avg_sq", &adam.max_exp_avg_sq()}};
  };
  if (auto* adamw = dynamic_cast<optim::AdamWParamState*>(&state)) {
    return moments(*adamw);
  }
  if (auto* adam = dynamic_cast<optim::AdamParamState*>(&state)) {
    return moments(*adam);
  }
  if (auto* sgd = dynamic_cast<optim::SGDParamState*>(&state)) {
    return {{"momentum_buffer", &sgd->momentum_buffer()}};
  }
  if (auto* adagrad = dynamic_cast<optim::AdagradParamState*>(&state)) {
    return {{"sum", &adagrad->sum()}};
  }
  auto* rmsprop = dynamic_cast<optim::RMSpropParamState*>(&state);
  TORCH_CHECK_NOT_IMPLEMENTED(
      rmsprop != nullptr,
      "fsdp: adopt: the optimizer keeps state of a class that is not known:"
      " expected one of libtorch's Adam, AdamW, SGD, RMSprop or Adagrad, but"
      " got ",
      c10::demangle(typeid(state).name()),
      ". Make the optimizer, or take its first step, after sharding.");
  return {
      {"square_avg", &rmsprop->square_avg()},
      {"momentum_buffer", &rmsprop->momentum_buffer()},
      {"grad_avg", &rmsprop->grad_avg()}};
}

/// What this rank keeps of `state`, which is as large as parameter `index`.
at::Tensor own_part(
    const at::Tensor& state,
    const detail::FlatGroup& group,
    int64_t index) {
  const auto owned = group.layout().owned_of_parameter(index, group.position());
  return state.detach()
      .reshape({-1})
      .narrow(0, owned.begin, owned.numel())
      .clone();
}

/// The tensor that replaces `state`; undefined when it may stay.
at::Tensor adopted(
    const StateTensor& state,
    const detail::FlatGroup& group,
    int64_t index) {
  const auto& parameter = group.parameters()[index];
  const auto& tensor = *state.tensor;
  const auto whole = at::IntArrayRef(parameter.sizes);
  const auto at_rest = group.sizes_at_rest(index);
  if (!tensor.defined() || tensor.sizes() == at_rest) {
    return {};
  }
  TORCH_CHECK_VALUE(
      tensor.numel() == c10::multiply_integers(whole),
      "fsdp: adopt: state '",
      state.name,
      "' of parameter '",
      parameter.name(),
      "' (",
      group.net().rank_text(),
      ") fits neither the whole parameter nor this rank's shard: expected"
      " shape ",
      whole,
      " or ",
      at::IntArrayRef(at_rest),
      ", but got ",
      tensor.sizes(),
      ". Was the optimizer made for this model, and loaded from a file of this"
      " world size?");
  return own_part(tensor, group, index).view(at_rest);
}

} // namespace

void ShardedModule::adopt(optim::Optimizer& optimizer) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      dynamic_cast<optim::LBFGS*>(&optimizer) == nullptr,
      "fsdp: adopt: torch::optim::LBFGS works on one flat gradient of all"
      " parameters and would see this rank's part only. Use an element-wise"
      " optimizer.");
  const detail::InternalGuard internal;
  std::vector<std::pair<at::Tensor*, at::Tensor>> replacements;
  for (const auto& unit : net()->units()) {
    for (const auto& group : unit->groups) {
      for (const auto i : c10::irange(group->layout().size())) {
        const auto found = optimizer.state().find(
            group->parameters()[i].tensor.unsafeGetTensorImpl());
        if (found == optimizer.state().end()) {
          continue;
        }
        for (const auto& state : tensors_of(*found->second)) {
          if (auto part = adopted(state, *group, i); part.defined()) {
            replacements.emplace_back(state.tensor, std::move(part));
          }
        }
      }
    }
  }
  for (auto& [tensor, part] : replacements) {
    *tensor = std::move(part);
  }
}

} // namespace fsdp
