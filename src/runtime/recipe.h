#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch::autograd {
struct SavedVariableHooks;
}

namespace fsdp::detail {

/// [Note: Values computed only from weights] A copy of weights in another
/// dtype, a normalised weight, a concatenation of weights: autograd would save
/// such a value and with it as many bytes as the weights have, for all units at
/// once. It is a function of weights alone, so it can be computed again in
/// backward. The fallback remembers for the output's storage how it was made,
/// and the saved-tensor hooks of our engine save this recipe instead of the
/// value. Operators that draw random numbers, write to an argument, or save
/// their own output are left alone.
class Recipe {
 public:
  /// A recipe for a call of `op` with these arguments, if all tensors among
  /// them are weights or values that have recipes.
  static std::shared_ptr<const Recipe> of(
      const c10::OperatorHandle& op,
      c10::ArrayRef<c10::IValue> arguments);

  /// Computes an output again. Throws when a weight was changed in place since,
  /// as autograd does.
  at::Tensor output(size_t index) const;

 private:
  explicit Recipe(const c10::OperatorHandle& op) : op_(op) {}
  bool add(const c10::IValue& argument);
  std::optional<at::Tensor> keep(const at::Tensor& tensor);
  c10::IValue restore(const c10::IValue& argument) const;

  /// Another value with a recipe, as an argument: how to make it, and how the
  /// argument lay in it. `placeholder` stands for it in arguments_.
  struct Ingredient {
    at::Tensor placeholder;
    std::shared_ptr<const Recipe> recipe;
    size_t output;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    int64_t offset;
  };

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  std::vector<Ingredient> ingredients_;
  std::vector<std::pair<at::Tensor, uint32_t>> weights_; // with versions
};

/// Lets the tensors among `outputs` carry the recipe. Until the end of the
/// region, tensors that autograd saves on this thread go through its hooks.
void attach_recipe(
    const std::shared_ptr<const Recipe>& recipe,
    c10::ArrayRef<c10::IValue> outputs);

/// The hooks for a tensor that autograd is about to save, or null when no value
/// with a recipe was made in this region.
std::unique_ptr<torch::autograd::SavedVariableHooks> recipe_hooks();

/// At the end of a region.
void forget_recipes();

} // namespace fsdp::detail
