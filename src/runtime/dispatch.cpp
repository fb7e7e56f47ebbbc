// [Note: Touch] Every operator goes through libtorch's dispatcher. Parameters,
// and all views of them, carry a dispatch key that comes before autograd, so
// the fallback below sees exactly the operators that read a parameter, before
// they run. It makes the units whole that the operator reads, casts the
// operator's other inputs where a policy asks for it, and dispatches on. In
// backward it is the same: gradient formulas read saved weights or views of
// them.

#include "runtime/errors.h"
#include "runtime/flat_group.h"
#include "runtime/internal_guard.h"
#include "runtime/net.h"
#include "runtime/operator_info.h"
#include "runtime/recipe.h"
#include "runtime/touch.h"
#include "runtime/unit_storage.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>

namespace fsdp::detail {

namespace {

using Groups = c10::SmallVector<FlatGroup*, 4>;

constexpr auto kBelowTouch =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);

/// Calls visit(tensor) for the tensors of one argument.
template <class F>
void each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isList()) { // optional tensors, or no tensors at all
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) {
        visit(element.toTensor());
      }
    }
  }
}

/// What one call of an operator does with parameters, shards and gradients.
class OperatorCall {
 public:
  OperatorCall(const OperatorInfo& info, torch::jit::Stack& stack)
      : info_(info),
        arguments_(torch::jit::last(stack, info.writes.size())),
        first_(stack.size() - info.writes.size()),
        stack_(stack) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        classify(tensor, info_.writes[i]);
      });
    }
  }

  /// Throws for what cannot be right.
  void check() const {
    if (grad_shard_.defined()) {
      check_gradient_shard();
    }
    if (frozen_shard_.defined() && reads_foreign_) {
      refuse_shard(frozen_shard_); // it would broadcast, or be cut off
    }
  }

  const Groups& whole() const { return whole_; }
  const Groups& written() const { return written_; }
  const Groups& written_shards() const { return written_shards_; }

  void cast_inputs();

  /// The parameter that gets other contents, if this is such an operator.
  at::Tensor replaced() const;

  /// How to compute the results again, when they depend on weights only.
  std::shared_ptr<const Recipe> recipe(const c10::OperatorHandle& op) const;

 private:
  void classify(const at::Tensor& tensor, bool writes);
  void classify_whole(const at::Tensor& tensor, FlatGroup* group, bool writes);
  void classify_shard(const at::Tensor& tensor, FlatGroup* group, bool writes);
  [[noreturn]] void refuse_shard(const at::Tensor& tensor) const;
  void classify_gradient(
      const at::Tensor& tensor,
      const UnitStorage& storage,
      FlatGroup* group);
  void check_gradient_shard() const;

  const OperatorInfo& info_;
  at::ArrayRef<c10::IValue> arguments_;
  size_t first_;
  torch::jit::Stack& stack_;
  Groups whole_; // groups whose weights it reads or writes
  Groups written_;
  Groups written_shards_;
  bool reads_derived_ = false; // values computed only from weights
  bool reads_others_ = false;  // tensors that are no weights
  bool reads_foreign_ = false; // tensors that are none of ours
  at::Tensor frozen_shard_;    // of a parameter, while autograd records
  at::Tensor grad_shard_;      // one that it reads
  at::Tensor foreign_written_; // a tensor of the program that it writes
};

void add(Groups& groups, FlatGroup* group) {
  if (std::find(groups.begin(), groups.end(), group) == groups.end()) {
    groups.push_back(group);
  }
}

void OperatorCall::classify(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined()) {
    return;
  }
  auto* storage = unit_storage(tensor);
  if (storage == nullptr) {
    reads_foreign_ =
        reads_foreign_ || !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    reads_others_ = reads_others_ || reads_foreign_;
    if (writes) {
      foreign_written_ = tensor;
    }
    return;
  }
  auto* group = storage->tag->group.load();
  switch (storage->kind) {
    case StorageKind::kWhole:
      classify_whole(tensor, group, writes);
      break;
    case StorageKind::kShard:
      reads_others_ = true;
      classify_shard(tensor, group, writes);
      break;
    case StorageKind::kGradient:
      reads_others_ = true;
      classify_gradient(tensor, *storage, group);
      break;
    case StorageKind::kDerived:
      reads_derived_ = true;
      if (writes) {
        storage->recipe.reset();
      }
      break;
  }
}

void OperatorCall::classify_whole(
    const at::Tensor& tensor,
    FlatGroup* group,
    bool writes) {
  TORCH_CHECK_VALUE(
      group != nullptr,
      "fsdp: ",
      info_.name,
      " reads a weight of a net that was destroyed.");
  TORCH_CHECK_VALUE(
      group->net().in_region(),
      "fsdp: ",
      info_.name,
      " reads parameter '",
      group->name_at(tensor.storage_offset()),
      "', or a view of it, outside of a region (",
      group->net().rank_text(),
      "). Whole weights exist only inside: clone() what is needed later, or "
      "hold"
      " net.region() around its use.");
  add(whole_, group);
  if (writes) {
    add(written_, group);
  }
}

void OperatorCall::classify_shard(
    const at::Tensor& tensor,
    FlatGroup* group,
    bool writes) {
  if (group == nullptr) {
    return; // what is left of a net that is gone: an ordinary tensor
  }
  if (at::GradMode::is_enabled() && !info_.allowed_on_shard) {
    if (tensor.requires_grad()) {
      refuse_shard(tensor);
    }
    if (is_parameter(*group, tensor)) {
      frozen_shard_ = tensor;
    }
  }
  if (writes) {
    add(written_shards_, group);
  }
}

void OperatorCall::refuse_shard(const at::Tensor& tensor) const {
  const auto& group = *unit_storage(tensor)->tag->group.load();
  TORCH_CHECK_VALUE(
      false,
      "fsdp: ",
      info_.name,
      " uses parameter '",
      shard_name(group, tensor),
      "' outside of a region; there it is a shard of ",
      tensor.numel(),
      " elements (",
      group.net().rank_text(),
      "). Call the net, net(x), or"
      " net.call(...), or hold net.region(); module->forward(x) alone does not"
      " open one.");
}

void OperatorCall::classify_gradient(
    const at::Tensor& tensor,
    const UnitStorage& storage,
    FlatGroup* group) {
  if (group == nullptr) {
    return;
  }
  const bool lost = storage.graph_dropped && at::GradMode::is_enabled() &&
      !info_.writes_any && !info_.allowed_on_shard;
  TORCH_CHECK_VALUE(
      !lost,
      "fsdp: ",
      info_.name,
      " uses the .grad of a parameter of unit '",
      group->settings().unit_name,
      "' after backward with create_graph. The"
      " reduction over ranks has no graph, so a loss on it would miss this "
      "term:"
      " use torch::autograd::grad inside of a region, or torch::NoGradGuard to"
      " look at the values.");
  if (!group->replicated()) {
    grad_shard_ = tensor;
  }
}

void OperatorCall::check_gradient_shard() const {
  auto& group = *unit_storage(grad_shard_)->tag->group.load();
  const bool mismatch = info_.is_update && foreign_written_.defined() &&
      foreign_written_.dim() > 0 &&
      foreign_written_.sizes() != grad_shard_.sizes();
  TORCH_CHECK_VALUE(
      written_.empty() && !(mismatch && group.net().in_region()),
      "fsdp: ",
      info_.name,
      " combines whole tensors with the gradient shard of"
      " parameter '",
      gradient_name(group, grad_shard_),
      "' inside a region (",
      group.net().rank_text(),
      "). Call optimizer.step() after the region has closed.");
  TORCH_CHECK_VALUE(
      !mismatch,
      "fsdp: ",
      info_.name,
      " combines a tensor of shape ",
      foreign_written_.defined() ? foreign_written_.sizes() : at::IntArrayRef{},
      " with the gradient shard of parameter '",
      gradient_name(group, grad_shard_),
      "', of shape ",
      grad_shard_.sizes(),
      " (",
      group.net().rank_text(),
      "). Optimizer state from before sharding has"
      " whole shapes: make the optimizer, or take its first step, after"
      " sharding.");
  if (group.settings().world_size == 1) {
    return;
  }
  TORCH_CHECK_VALUE(
      !info_.is_concatenation,
      "fsdp: ",
      info_.name,
      " joins gradient shards (",
      group.net().rank_text(),
      "). Algorithms over one flat gradient, such as torch::optim::LBFGS, would"
      " see this rank's part only and go wrong silently. Use an element-wise"
      " optimizer, or clone() the shards if parts are what you want.");
  if (info_.is_norm && group.settings().rank == 0) {
    TORCH_WARN_ONCE(
        "fsdp: a norm of a gradient shard is the norm of this rank's part only;"
        " torch::nn::utils::clip_grad_norm_ would scale each rank differently."
        " Use net.clip_grad_norm_().");
  }
}

std::shared_ptr<const Recipe> OperatorCall::recipe(
    const c10::OperatorHandle& op) const {
  const bool candidate = (reads_derived_ || !whole_.empty()) &&
      !reads_others_ && !info_.writes_any && !info_.reads_nothing &&
      info_.repeatable && at::GradMode::is_enabled();
  return candidate ? Recipe::of(op, arguments_) : nullptr;
}

at::Tensor OperatorCall::replaced() const {
  if (!info_.replaces_contents || !arguments_.front().isTensor()) {
    return {};
  }
  const auto& tensor = arguments_.front().toTensor();
  return unit_storage(tensor) != nullptr ? tensor : at::Tensor();
}

/// Of the program, not a weight.
bool is_input(const at::Tensor& tensor) {
  const auto* storage = unit_storage(tensor);
  return storage == nullptr || storage->kind == StorageKind::kDerived;
}

void OperatorCall::cast_inputs() {
  if (whole_.empty()) {
    return;
  }
  const auto dtype = whole_.front()->compute_dtype();
  for (const auto* group : whole_) {
    if (!group->settings().cast_inputs || group->compute_dtype() != dtype) {
      return;
    }
  }
  const auto needs_cast = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_floating_point() && tensor.dim() > 0 &&
        tensor.scalar_type() != dtype && is_input(tensor);
  };
  for (size_t i = 0; i < info_.casts.size(); ++i) {
    auto& value = stack_[first_ + i];
    if (!info_.casts[i]) {
      continue;
    }
    if (value.isTensor()) {
      if (needs_cast(value.toTensor())) {
        value = value.toTensor().to(dtype);
      }
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      if (std::none_of(tensors.begin(), tensors.end(), needs_cast)) {
        continue;
      }
      for (auto& tensor : tensors) {
        tensor = needs_cast(tensor) ? tensor.to(dtype) : tensor;
      }
      value = std::move(tensors);
    }
  }
}

void touch_fallback(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto below = keys & kBelowTouch;
  if (InternalGuard::active()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const auto& info = info_of(op);
  OperatorCall call(info, *stack);
  call.check();
  for (auto* group : call.written_shards()) {
    group->net().shard_written(*group);
  }
  const auto recipe = call.recipe(op);
  const auto replaced = call.replaced();
  if (call.whole().empty() || info.reads_nothing) {
    op.redispatchBoxed(below, stack);
  } else {
    const Pins pins({call.whole().begin(), call.whole().end()});
    for (auto* group : call.written()) {
      group->net().mark_written(*group);
    }
    call.cast_inputs();
    op.redispatchBoxed(below, stack);
  }
  if (replaced.defined()) {
    // A graph that has read the old contents would read the new ones.
    torch::autograd::impl::bump_version(replaced);
  }
  if (recipe != nullptr) {
    attach_recipe(
        recipe, torch::jit::last(*stack, op.schema().returns().size()));
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(
      torch::CppFunction::makeFromBoxedFunction<&touch_fallback>());
}

} // namespace fsdp::detail
