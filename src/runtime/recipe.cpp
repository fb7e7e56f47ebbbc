#include "runtime/recipe.h"

#include "runtime/internal_guard.h"
#include "runtime/unit_storage.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>

namespace fsdp::detail {

namespace {

thread_local bool recipes_made = false;

/// The storage of a value that has a recipe, else null.
UnitStorage* derived_storage(const at::Tensor& tensor) {
  auto* storage = unit_storage(tensor);
  const bool derived = storage != nullptr &&
      storage->kind == StorageKind::kDerived && storage->recipe != nullptr;
  return derived ? storage : nullptr;
}

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

void check_version(const at::Tensor& tensor, uint32_t version) {
  TORCH_CHECK(
      tensor._version() == version,
      "one of the variables needed for gradient computation has been modified "
      "by"
      " an inplace operation: a tensor of shape ",
      tensor.sizes(),
      " is at version ",
      tensor._version(),
      "; expected version ",
      version,
      " instead.");
}

/// Saves the recipe of a value, or the tensor itself when it has none. The
/// version check of autograd is off for tensors with hooks, so it is done here.
class RecipeHooks final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    if (const auto* storage = derived_storage(tensor)) {
      recipe_ = storage->recipe;
      output_ = storage->recipe_output;
      sizes_ = tensor.sizes().vec();
      strides_ = tensor.strides().vec();
      offset_ = tensor.storage_offset();
      return;
    }
    // Without its node, which would hold itself alive through an output; with
    // its version counter, which only the in-place-or-view kernels pass on.
    const at::AutoDispatchBelowAutograd below;
    saved_ = tensor.detach();
    checks_version_ = !tensor.is_inference();
    version_ = checks_version_ ? tensor._version() : 0;
  }

  at::Tensor call_unpack_hook() override {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    if (recipe_ != nullptr) {
      return recipe_->output(output_).as_strided(sizes_, strides_, offset_);
    }
    if (checks_version_) {
      check_version(saved_, version_);
    }
    return saved_;
  }

 private:
  std::shared_ptr<const Recipe> recipe_;
  size_t output_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  int64_t offset_ = 0;
  at::Tensor saved_;
  bool checks_version_ = false;
  uint32_t version_ = 0;
};

/// Moves the memory of `tensor` to a storage that knows the recipe.
void attach_to(
    const at::Tensor& tensor,
    const std::shared_ptr<const Recipe>& recipe,
    size_t output) {
  auto* known = unit_storage(tensor);
  if (known != nullptr && known->kind == StorageKind::kDerived) {
    if (known->recipe == nullptr) { // made by a factory, then written to
      known->recipe = recipe;
      known->recipe_output = output;
    }
    return;
  }
  const bool suitable = tensor.defined() && tensor.has_storage() &&
      tensor.layout() == c10::kStrided && known == nullptr &&
      tensor.storage().use_count() == 1 && !tensor.is_conj() &&
      !tensor.is_neg() && !is_wrapped_number(tensor);
  if (!suitable) {
    return;
  }
  auto* old = tensor.storage().unsafeGetStorageImpl();
  const auto nbytes = old->nbytes();
  static const auto no_group = std::make_shared<const GroupTag>();
  const auto storage = c10::make_intrusive<UnitStorage>(
      StorageKind::kDerived,
      no_group,
      nbytes,
      old->set_data_ptr(c10::DataPtr(nullptr, tensor.device())));
  storage->recipe = recipe;
  storage->recipe_output = output;
  const auto contents = tensor_on(
      storage, tensor.scalar_type(), tensor.sizes(), 0, Touched::kYes);
  contents.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides());
  contents.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  tensor.unsafeGetTensorImpl()->shallow_copy_from(contents.getIntrusivePtr());
  recipes_made = true;
}

} // namespace

std::shared_ptr<const Recipe> Recipe::of(
    const c10::OperatorHandle& op,
    c10::ArrayRef<c10::IValue> arguments) {
  std::shared_ptr<Recipe> recipe(new Recipe(op));
  for (const auto& argument : arguments) {
    if (!recipe->add(argument)) {
      return nullptr;
    }
  }
  return recipe->weights_.empty() && recipe->ingredients_.empty() ? nullptr
                                                                  : recipe;
}

std::optional<at::Tensor> Recipe::keep(const at::Tensor& tensor) {
  if (!tensor.defined() || is_wrapped_number(tensor)) {
    return tensor;
  }
  if (const auto* storage = derived_storage(tensor)) {
    ingredients_.push_back(
        {at::empty({0}),
         storage->recipe,
         storage->recipe_output,
         tensor.sizes().vec(),
         tensor.strides().vec(),
         tensor.storage_offset()});
    return ingredients_.back().placeholder;
  }
  const auto* storage = unit_storage(tensor);
  if (storage == nullptr || storage->kind != StorageKind::kWhole ||
      tensor.is_inference()) {
    return std::nullopt;
  }
  weights_.emplace_back(tensor, tensor._version());
  return tensor;
}

bool Recipe::add(const c10::IValue& argument) {
  const InternalGuard internal;
  if (argument.isTensor()) {
    const auto kept = keep(argument.toTensor());
    if (kept.has_value()) {
      arguments_.emplace_back(*kept);
    }
    return kept.has_value();
  }
  if (argument.isTensorList()) {
    auto tensors = argument.toTensorVector();
    for (auto& tensor : tensors) {
      auto kept = keep(tensor);
      if (!kept.has_value()) {
        return false;
      }
      tensor = std::move(*kept);
    }
    arguments_.emplace_back(std::move(tensors));
    return true;
  }
  arguments_.push_back(argument);
  return !argument.isOptionalTensorList() && !argument.isGenerator();
}

c10::IValue Recipe::restore(const c10::IValue& argument) const {
  const auto restored = [&](const at::Tensor& tensor) {
    const auto found = std::find_if(
        ingredients_.begin(), ingredients_.end(), [&](const auto& each) {
          return each.placeholder.is_same(tensor);
        });
    return found == ingredients_.end()
        ? tensor
        : found->recipe->output(found->output)
              .as_strided(found->sizes, found->strides, found->offset);
  };
  if (argument.isTensor()) {
    return restored(argument.toTensor());
  }
  if (argument.isTensorList()) {
    auto tensors = argument.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = restored(tensor);
    }
    return tensors;
  }
  return argument;
}

at::Tensor Recipe::output(size_t index) const {
  for (const auto& [weight, version] : weights_) {
    check_version(weight, version);
  }
  torch::jit::Stack stack;
  for (const auto& argument : arguments_) {
    stack.push_back(restore(argument));
  }
  op_.callBoxed(stack);
  return stack.at(index).toTensor();
}

void attach_recipe(
    const std::shared_ptr<const Recipe>& recipe,
    c10::ArrayRef<c10::IValue> outputs) {
  const InternalGuard internal;
  for (const auto i : c10::irange(outputs.size())) {
    if (outputs[i].isTensor()) {
      attach_to(outputs[i].toTensor(), recipe, i);
    }
  }
}

std::unique_ptr<torch::autograd::SavedVariableHooks> recipe_hooks() {
  return recipes_made ? std::make_unique<RecipeHooks>() : nullptr;
}

void forget_recipes() {
  recipes_made = false;
}

} // namespace fsdp::detail
