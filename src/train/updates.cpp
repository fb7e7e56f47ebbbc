#include "train/updates.h"

#include "runtime/flat_group.h"
#include "runtime/net.h"
#include "runtime/shard_place.h"

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

namespace fsdp::detail {

namespace {

void check_update(
    const char* optimizer,
    const at::Tensor& parameter,
    const at::Tensor& gradient) {
  TORCH_CHECK_VALUE(
      !is_whole_in_region(parameter),
      "fsdp: ",
      optimizer,
      ": step() would combine whole ",
      parameter_text(parameter),
      " with its gradient shard inside a region. Call optimizer.step() after"
      " the region has closed.");
  TORCH_CHECK_VALUE(
      gradient.layout() == c10::kStrided,
      "fsdp: ",
      optimizer,
      ": the gradient of ",
      parameter_text(parameter),
      " is sparse: expected a dense one, but got layout ",
      gradient.layout(),
      ". Make the embedding with sparse(false), or assign grad.to_dense().");
  TORCH_CHECK_VALUE(
      gradient.sizes() == parameter.sizes(),
      "fsdp: ",
      optimizer,
      ": ",
      parameter_text(parameter),
      " and its gradient differ in shape: expected ",
      parameter.sizes(),
      ", but the gradient has ",
      gradient.sizes(),
      ". Is whole_parameters() open? Close it before the step.");
  TORCH_CHECK_TYPE(
      gradient.scalar_type() == parameter.scalar_type() &&
          gradient.device() == parameter.device(),
      "fsdp: ",
      optimizer,
      ": ",
      parameter_text(parameter),
      " and its gradient differ in type: expected ",
      parameter.toString(),
      ", but the gradient is ",
      gradient.toString(),
      ". Convert the gradient.");
}

bool starts_earlier(const Update& a, const Update& b) {
  const auto place = [](const Update& update) {
    return update.group == nullptr
        ? std::make_tuple(uint64_t{0}, size_t{0}, int64_t{0})
        : std::make_tuple(
              update.group->net().id() + 1,
              update.group->index(),
              update.parameter.storage_offset());
  };
  const auto place_a = place(a);
  const auto place_b = place(b);
  return place_a != place_b ? place_a < place_b
                            : std::less<>()(
                                  a.parameter.unsafeGetTensorImpl(),
                                  b.parameter.unsafeGetTensorImpl());
}

bool same_parameter(const Update& a, const Update& b) {
  return a.parameter.is_same(b.parameter);
}

} // namespace

std::vector<Update> updates_of(
    const char* optimizer,
    const torch::optim::OptimizerParamGroup& params) {
  std::vector<Update> updates;
  updates.reserve(params.params().size());
  for (const auto& parameter : params.params()) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) {
      continue;
    }
    check_update(optimizer, parameter, gradient);
    auto& update = updates.emplace_back();
    update.parameter = parameter;
    update.gradient = gradient;
    update.group = group_of_shard(parameter);
  }
  return updates;
}

void check_state(
    const char* optimizer,
    const char* name,
    const at::Tensor& state,
    const at::Tensor& parameter) {
  TORCH_CHECK_VALUE(
      !state.defined() || state.sizes() == parameter.sizes(),
      "fsdp: ",
      optimizer,
      ": state '",
      name,
      "' of ",
      parameter_text(parameter),
      " has another shape: expected ",
      parameter.sizes(),
      ", but got ",
      state.defined() ? state.sizes() : at::IntArrayRef(),
      ". State from before sharding has whole shapes: call"
      " net.adopt(optimizer) after sharding.");
  TORCH_CHECK_TYPE(
      !state.defined() || state.scalar_type() == parameter.scalar_type(),
      "fsdp: ",
      optimizer,
      ": state '",
      name,
      "' of ",
      parameter_text(parameter),
      " has another dtype: expected ",
      parameter.scalar_type(),
      ", but got ",
      state.defined() ? state.scalar_type() : at::ScalarType::Undefined,
      ". Make a new optimizer after the model was converted.");
}

void announce_writes(const std::vector<std::vector<Update>>& updates) {
  std::vector<FlatGroup*> groups;
  for (const auto& each : updates) {
    for (const auto& update : each) {
      if (update.group != nullptr &&
          (groups.empty() || groups.back() != update.group)) {
        groups.push_back(update.group);
      }
    }
  }
  std::sort(groups.begin(), groups.end(), [](FlatGroup* a, FlatGroup* b) {
    // Net by net in the order in which they were made: the same on all ranks.
    return std::make_pair(a->net().id(), a->index()) <
        std::make_pair(b->net().id(), b->index());
  });
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
  for (auto* group : groups) {
    group->net().shard_written(*group);
  }
}

std::vector<Update> take_distinct(std::vector<Update>& updates) {
  if (!std::is_sorted(updates.begin(), updates.end(), starts_earlier)) {
    std::stable_sort(updates.begin(), updates.end(), starts_earlier);
  }
  std::vector<Update> later;
  std::vector<Update> distinct;
  distinct.reserve(updates.size());
  for (auto& update : updates) {
    const bool again =
        !distinct.empty() && same_parameter(distinct.back(), update);
    (again ? later : distinct).push_back(std::move(update));
  }
  updates = std::move(later);
  return distinct;
}

} // namespace fsdp::detail
