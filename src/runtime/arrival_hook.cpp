#include "runtime/arrival_hook.h"

#include "runtime/flat_group.h"
#include "runtime/internal_guard.h"
#include "runtime/net.h"

#include <c10/util/irange.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::detail {

namespace {

using torch::autograd::PostAccumulateGradHook;

class ArrivalHook final : public PostAccumulateGradHook {
 public:
  ArrivalHook(
      std::shared_ptr<const GroupTag> tag,
      int64_t index,
      std::unique_ptr<PostAccumulateGradHook> replaced)
      : tag_(std::move(tag)),
        index_(index),
        replaced_(std::move(replaced)) {}

  void operator()(const at::Tensor& variable) override {
    auto* group = tag_->group.load();
    if (group == nullptr) {
      return;
    }
    const auto gradient = std::exchange(variable.mutable_grad(), {});
    if (!gradient.defined()) {
      return; // frozen after its use: the engine calls all the same
    }
    group->net().gradient_arrived(*group, index_, gradient);
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

  FlatGroup* group() const { return tag_->group.load(); }
  std::unique_ptr<PostAccumulateGradHook>& replaced() { return replaced_; }

 private:
  std::shared_ptr<const GroupTag> tag_;
  int64_t index_;
  std::unique_ptr<PostAccumulateGradHook> replaced_;
};

using Slot = std::unique_ptr<PostAccumulateGradHook>;

/// Null for a tensor that autograd has never seen.
Slot* slot_of(const at::Tensor& variable) {
  return torch::autograd::impl::get_autograd_meta(variable) == nullptr
      ? nullptr
      : &torch::autograd::impl::post_acc_grad_hooks(variable);
}

ArrivalHook* hook_of(const at::Tensor& variable) {
  const auto* slot = slot_of(variable);
  return slot == nullptr ? nullptr : dynamic_cast<ArrivalHook*>(slot->get());
}

bool can_require_grad(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) ||
      at::isComplexType(tensor.scalar_type());
}

} // namespace

void install_arrival_hooks(FlatGroup& group) {
  for (const auto i : c10::irange(group.parameters().size())) {
    const auto& tensor = group.parameters()[i].tensor;
    if (!can_require_grad(tensor)) {
      return; // a group has one dtype
    }
    if (hook_of(tensor) != nullptr) {
      continue;
    }
    auto* slot = slot_of(tensor);
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor,
        std::make_unique<ArrivalHook>(
            group.tag(),
            static_cast<int64_t>(i),
            slot == nullptr ? nullptr : std::move(*slot)));
  }
}

void remove_arrival_hooks(FlatGroup& group) {
  for (const auto& parameter : group.parameters()) {
    if (auto* hook = hook_of(parameter.tensor)) {
      auto replaced = std::move(hook->replaced());
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameter.tensor, std::move(replaced));
    }
  }
}

void run_replaced_hook(const at::Tensor& parameter) {
  auto* hook = hook_of(parameter);
  if (hook != nullptr && hook->replaced()) {
    (*hook->replaced())(parameter);
  }
}

Net* net_of(const at::Tensor& variable) {
  const auto* hook = hook_of(variable);
  const auto* group = hook == nullptr ? nullptr : hook->group();
  if (hook == nullptr) { // replaced by the program inside of a region
    const auto* storage = unit_storage(variable);
    group = storage == nullptr ? nullptr : storage->tag->group.load();
  }
  return group == nullptr ? nullptr : &group->net();
}

} // namespace fsdp::detail
