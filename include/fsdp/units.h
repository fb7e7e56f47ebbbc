#pragma once

#include <fsdp/export.h>
#include <fsdp/unit_options.h>

#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace fsdp {

/// Chooses which modules become units. Policies are made by the functions below
/// and joined by `|`: they apply from left to right and the first match of a
/// module wins; modules are visited children first; the root module is never
/// asked and takes what is left. A policy that matches no module is an error,
/// which lists the modules that there are.
class FSDP_API UnitPolicy {
 public:
  /// What a rule is asked about.
  struct Candidate {
    const std::string& name; // "layers.0"
    const torch::nn::Module& module;
    int64_t free_numel; // elements of its parameters that no unit has taken
  };
  struct Rule {
    std::string description; // "each<Block>()", for errors
    std::function<std::optional<UnitOptions>(const Candidate&)> match;
    /// All matches form one unit instead of one unit each.
    bool together = false;
    /// Patterns of names, each of which must match a module.
    std::vector<std::string> patterns = {};
  };

  UnitPolicy() = default;
  explicit UnitPolicy(Rule rule) : rules_{std::move(rule)} {}

  const std::vector<Rule>& rules() const { return rules_; }

  friend UnitPolicy operator|(UnitPolicy left, const UnitPolicy& right) {
    left.rules_.insert(
        left.rules_.end(), right.rules_.begin(), right.rules_.end());
    return left;
  }

 private:
  std::vector<Rule> rules_;
};

/// Modules whose dotted name matches one pattern: `*`, `?` and `[...]` match
/// inside one part of the name, so "layers.*" is every child of `layers`.
FSDP_API UnitPolicy named(const std::string& pattern);
FSDP_API UnitPolicy
named(const std::string& pattern, const UnitOptions& options);

/// One unit of all modules whose names match one of `patterns`.
FSDP_API UnitPolicy together(const std::vector<std::string>& patterns);
FSDP_API UnitPolicy
together(const std::vector<std::string>& patterns, const UnitOptions& options);

/// Modules with at least `numel` parameter elements that no unit inside them
/// has taken.
FSDP_API UnitPolicy at_least(int64_t numel);
FSDP_API UnitPolicy at_least(int64_t numel, const UnitOptions& options);

/// Modules for which `choose` returns options.
FSDP_API UnitPolicy when(std::function<std::optional<UnitOptions>(
                             const std::string& name,
                             const torch::nn::Module& module)> choose);

namespace detail {

/// `BlockImpl` of the module holder `Block`; a module class as it is.
template <
    class T,
    bool = std::is_base_of_v<torch::detail::ModuleHolderIndicator, T>>
struct ModuleClass {
  using type = T;
};
template <class T>
struct ModuleClass<T, true> {
  using type = typename T::ContainedType;
};

using ModuleTest = std::function<bool(const torch::nn::Module&)>;
FSDP_API UnitPolicy
each(std::string description, ModuleTest test, const UnitOptions* options);

/// "each<Block, Mlp>()"
template <class First, class... Rest>
std::string describe_each() {
  std::string text = "each<" + std::string(c10::demangle_type<First>());
  ((text += ", " + std::string(c10::demangle_type<Rest>())), ...);
  return text + ">()";
}

template <class... T>
bool is_any_of(const torch::nn::Module& module) {
  return (
      (dynamic_cast<const typename ModuleClass<T>::type*>(&module) !=
       nullptr) ||
      ...);
}

} // namespace detail

/// Every module of one of the types `T` (`Block` or `BlockImpl`) or of a class
/// derived from it.
template <class... T>
UnitPolicy each() {
  static_assert(sizeof...(T) > 0, "each<T...>() needs a module type");
  return detail::each(
      detail::describe_each<T...>(), &detail::is_any_of<T...>, nullptr);
}
template <class... T>
UnitPolicy each(const UnitOptions& options) {
  static_assert(sizeof...(T) > 0, "each<T...>(options) needs a module type");
  return detail::each(
      detail::describe_each<T...>(), &detail::is_any_of<T...>, &options);
}

} // namespace fsdp
