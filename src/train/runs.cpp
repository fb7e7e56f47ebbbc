#include "train/runs.h"

#include "layout/flat_layout.h"
#include "runtime/flat_group.h"
#include "runtime/shard_place.h"
#include "runtime/unit_storage.h"
#include "train/vector_tails.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <span>
#include <utility>

namespace fsdp::detail {

namespace {

/// Neighbours that may form one run, or a single parameter.
using Chain = std::span<Update>;

/// Elements from the first of a chain to the first of a member.
int64_t distance_of(const Chain& chain, const Update& member) {
  return member.parameter.storage_offset() -
      chain.front().parameter.storage_offset();
}

int64_t numel_of(const Chain& chain) {
  return distance_of(chain, chain.back()) + chain.back().parameter.numel();
}

bool in_one_order(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
      ((a.is_contiguous() && b.is_contiguous()) ||
       (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

/// Whether the elements in memory, from the first on, are the tensor's.
bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() &&
      !tensor.is_neg();
}

/// The kernels walk through memory and look at no strides.
at::Tensor in_order_of(const at::Tensor& parameter, const at::Tensor& values) {
  return in_one_order(values, parameter) && is_plain_memory(values)
      ? values
      : at::empty_like(parameter).copy_(values);
}

bool are_neighbours(const Update& a, const Update& b) {
  if (a.group == nullptr || a.group != b.group || a.steps != b.steps) {
    return false;
  }
  const auto begin_a = a.parameter.storage_offset();
  const auto begin_b = b.parameter.storage_offset();
  const auto end_a = begin_a + a.parameter.numel();
  // The next one starts at the next aligned place; nothing lies between.
  return begin_b >= end_a && begin_b - end_a < kAlignmentNumel &&
      share_gradient_buffer(a.gradient, b.gradient) &&
      b.gradient.storage_offset() - a.gradient.storage_offset() ==
      begin_b - begin_a;
}

/// The longest chain that starts at `updates`.
Chain chain_from(const Chain& updates, Padding padding) {
  size_t count = 1;
  while (padding == Padding::kInRuns && count < updates.size() &&
         are_neighbours(updates[count - 1], updates[count])) {
    ++count;
  }
  return updates.first(count);
}

bool lies_side_by_side(const Chain& chain, size_t kind) {
  const auto& first = *chain.front().state[kind];
  for (const auto& member : chain) {
    const auto& state = *member.state[kind];
    const bool fits = state.defined() && state.is_alias_of(first) &&
        state.storage_offset() - first.storage_offset() ==
            distance_of(chain, member) &&
        in_one_order(state, member.parameter) && is_plain_memory(state);
    if (!fits) {
      return false;
    }
  }
  return true;
}

/// State that is new, loaded or of parameters that were no neighbours before.
void lay_out_state(const Chain& chain, size_t kind) {
  const auto& first = chain.front().parameter;
  at::Tensor memory;
  if (chain.front().group != nullptr) {
    memory = at::zeros({numel_of(chain)}, first.options());
  }
  for (const auto& member : chain) {
    auto& state = *member.state[kind];
    auto place = memory.defined()
        ? tensor_on_storage_of(
              memory,
              memory.scalar_type(),
              member.parameter.sizes(),
              distance_of(chain, member))
        : at::zeros_like(first); // keeps the order in memory
    if (state.defined()) {
      place.copy_(state);
    }
    state = std::move(place);
  }
}

/// A shard may have no elements. Its state says so.
void give_empty_state(const Update& update) {
  for (auto* state : update.state) {
    if (!state->defined()) {
      *state = at::empty(update.parameter.sizes(), update.parameter.options());
    }
  }
}

/// Runs of one dtype and device.
struct Batch {
  at::TensorOptions type;
  Runs runs;
};

Runs& runs_of_type(std::vector<Batch>& batches, const at::Tensor& parameter) {
  for (auto& batch : batches) {
    if (batch.type.dtype() == parameter.dtype() &&
        batch.type.device() == parameter.device()) {
      return batch.runs;
    }
  }
  batches.push_back({parameter.options(), {}});
  return batches.back().runs;
}

void add_run(Runs& runs, const Chain& chain) {
  const auto numel = numel_of(chain);
  const auto& first = chain.front();
  runs.parameters.push_back(memory_from(first.parameter, numel));
  runs.gradients.push_back(memory_from(first.gradient, numel));
  runs.steps.push_back(first.steps);
  runs.state.resize(first.state.size());
  for (const auto kind : c10::irange(first.state.size())) {
    if (!lies_side_by_side(chain, kind)) {
      lay_out_state(chain, kind);
    }
    runs.state[kind].push_back(memory_from(*first.state[kind], numel));
  }
}

/// Parameters that are updated as a copy: `target` gets the result.
struct CopiedParameter {
  at::Tensor target;
  at::Tensor copy;
};

std::vector<CopiedParameter> bring_in_order(std::vector<Update>& updates) {
  std::vector<CopiedParameter> copied;
  for (auto& update : updates) {
    if (!is_plain_memory(update.parameter)) {
      auto copy =
          at::empty(update.parameter.sizes(), update.parameter.options());
      copy.copy_(update.parameter);
      copied.push_back({update.parameter, copy});
      update.parameter = std::move(copy);
    }
    update.gradient = in_order_of(update.parameter, update.gradient);
  }
  return copied;
}

} // namespace

void apply_updates(
    std::vector<Update>& updates,
    Padding padding,
    const UpdateKernel& kernel) {
  for (const auto& update : updates) {
    bump_version(update.parameter);
  }
  const auto empty = std::stable_partition(
      updates.begin(), updates.end(), [](const Update& update) {
        return update.parameter.numel() > 0;
      });
  std::for_each(empty, updates.end(), give_empty_state);
  updates.erase(empty, updates.end());
  auto copied = bring_in_order(updates);
  std::vector<Batch> batches;
  for (auto rest = Chain(updates); !rest.empty();) {
    auto chain = chain_from(rest, padding);
    rest = rest.subspan(chain.size());
    add_run(runs_of_type(batches, chain.front().parameter), chain);
  }
  for (auto& batch : batches) {
    VectorTails tails(batch.runs);
    kernel(batch.runs);
    tails.put_back();
  }
  for (auto& [target, copy] : copied) {
    target.copy_(copy);
  }
}

} // namespace fsdp::detail
