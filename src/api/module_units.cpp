#include "api/module_units.h"

#include "api/name_pattern.h"
#include "api/unit_marks.h"

#include <c10/util/irange.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace fsdp::detail {

namespace {

constexpr size_t kRoot = 0;

/// A module of the tree, with its place.
struct Node {
  std::string name; // empty for the root
  torch::nn::Module* module;
  std::vector<size_t> children;
  size_t unit = kRoot; // that takes its parameters
};

struct UnitChoice {
  std::string name;
  UnitOptions options;
};

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// All modules, parents before children, in order of registration.
class Tree {
 public:
  explicit Tree(torch::nn::Module& root) { add("", root); }

  std::vector<Node>& nodes() { return nodes_; }

 private:
  size_t add(std::string name, torch::nn::Module& module) {
    const size_t index = nodes_.size();
    nodes_.push_back({std::move(name), &module, {}});
    for (const auto& child : module.named_children()) {
      const auto child_name = join(nodes_[index].name, child.key());
      const auto child_index = add(child_name, *child.value());
      nodes_[index].children.push_back(child_index);
    }
    return index;
  }

  std::vector<Node> nodes_;
};

/// [Note: Which unit takes a parameter] Modules are visited children first. A
/// module that fully_shard() marked or a rule matches becomes a unit and takes
/// the parameters below it that no unit inside it has taken. A tensor that is
/// registered at several places belongs to the unit of its first place in order
/// of registration; the other places see the same tensor.
class UnitChooser {
 public:
  UnitChooser(Tree& tree, const UnitPolicy& policy)
      : nodes_(tree.nodes()),
        rules_(policy.rules()),
        matches_(rules_.size(), 0),
        together_(rules_.size(), kRoot) {
    choices_.push_back({"", UnitOptions()});
    choose(0);
    check_all_matched();
    order_by_registration();
  }

  const std::vector<UnitChoice>& choices() const { return choices_; }

 private:
  int64_t choose(size_t index) {
    auto& node = nodes_[index];
    int64_t free_numel = own_numel(*node.module);
    for (const auto child : node.children) {
      free_numel += choose(child);
    }
    const auto mark = take_mark(*node.module);
    if (index == 0) {
      return free_numel;
    }
    if (mark.has_value()) {
      choices_.push_back({node.name, *mark});
      assign(index, choices_.size() - 1);
      return 0;
    }
    for (const auto rule : c10::irange(rules_.size())) {
      const auto options =
          rules_[rule].match({node.name, *node.module, free_numel});
      if (options.has_value()) {
        ++matches_[rule];
        assign(index, unit_for(rule, node.name, *options));
        return 0;
      }
    }
    return free_numel;
  }

  int64_t own_numel(torch::nn::Module& module) {
    int64_t numel = 0;
    for (const auto& tensor : module.parameters(/*recurse=*/false)) {
      if (counted_.insert(tensor.unsafeGetTensorImpl()).second) {
        numel += tensor.numel();
      }
    }
    return numel;
  }

  size_t
  unit_for(size_t rule, const std::string& name, const UnitOptions& options) {
    if (rules_[rule].together && together_[rule] != kRoot) {
      return together_[rule];
    }
    choices_.push_back({name, options});
    together_[rule] = choices_.size() - 1;
    return choices_.size() - 1;
  }

  void assign(size_t index, size_t unit) {
    auto& node = nodes_[index];
    if (node.unit == kRoot) {
      node.unit = unit;
      for (const auto child : node.children) {
        assign(child, unit);
      }
    }
  }

  void check_all_matched() const {
    for (const auto rule : c10::irange(rules_.size())) {
      for (const auto& pattern : rules_[rule].patterns) {
        TORCH_CHECK_VALUE(
            std::any_of(
                nodes_.begin(),
                nodes_.end(),
                [&](const Node& node) {
                  return name_matches(pattern, node.name);
                }),
            "fsdp: unit policy ",
            rules_[rule].description,
            ": \"",
            pattern,
            "\" matches no module. The model has:",
            list_of_modules());
      }
      TORCH_CHECK_VALUE(
          matches_[rule] > 0,
          "fsdp: unit policy ",
          rules_[rule].description,
          " matches no module, or only modules that an earlier policy took."
          " The model has:",
          list_of_modules());
    }
  }

  std::string list_of_modules() const {
    constexpr size_t kMost = 60;
    std::ostringstream list;
    for (const auto i : c10::irange(std::min(nodes_.size(), kMost))) {
      list << "\n  '" << nodes_[i].name << "': " << nodes_[i].module->name();
    }
    if (nodes_.size() > kMost) {
      list << "\n  and " << nodes_.size() - kMost << " more";
    }
    return list.str();
  }

  /// Units in the order in which their first modules were registered.
  void order_by_registration() {
    std::vector<size_t> rank(choices_.size(), 0);
    std::vector<UnitChoice> ordered{choices_.front()};
    for (auto& node : nodes_) {
      if (node.unit != kRoot && rank[node.unit] == 0) {
        rank[node.unit] = ordered.size();
        ordered.push_back(choices_[node.unit]);
      }
      node.unit = rank[node.unit];
    }
    choices_ = std::move(ordered);
  }

  std::vector<Node>& nodes_;
  const std::vector<UnitPolicy::Rule>& rules_;
  std::vector<int> matches_;
  std::vector<size_t> together_; // the unit of a rule that makes one
  std::vector<UnitChoice> choices_;
  std::unordered_set<const c10::TensorImpl*> counted_;
};

bool is_or_is_below(const std::string& name, const std::string& ignored) {
  return name == ignored ||
      (name.size() > ignored.size() && name.starts_with(ignored) &&
       name[ignored.size()] == '.');
}

/// Which tensors Options::ignore names.
class IgnoreList {
 public:
  explicit IgnoreList(const std::vector<std::string>& names)
      : names_(names),
        used_(names.size(), false) {}

  bool contains(const std::string& name) {
    bool found = false;
    for (const auto i : c10::irange(names_.size())) {
      if (is_or_is_below(name, names_[i])) {
        used_[i] = true;
        found = true;
      }
    }
    return found;
  }

  void check_all_used() const {
    for (const auto i : c10::irange(names_.size())) {
      TORCH_CHECK_VALUE(
          used_[i],
          "fsdp: Options::ignore names '",
          names_[i],
          "', but no parameter and no module with parameters has this name.");
    }
  }

 private:
  const std::vector<std::string>& names_;
  std::vector<bool> used_;
};

Strategy strategy_with(bool reshard_after_forward, Strategy strategy) {
  if (is_hybrid(strategy)) {
    return reshard_after_forward ? Strategy::kHybridShard
                                 : Strategy::kHybridShardGradOp;
  }
  return reshard_after_forward ? Strategy::kFullShard : Strategy::kShardGradOp;
}

void check_resharding(const std::string& name, const UnitOptions& unit) {
  const auto ranks = unit.reshard_after_forward_to();
  TORCH_CHECK_VALUE(
      !ranks || *ranks >= 1,
      "fsdp: unit '",
      name,
      "': expected reshard_after_forward_to to be at least 1, but got ",
      ranks.value_or(0),
      ".");
  TORCH_CHECK_VALUE(
      !ranks || unit.reshard_after_forward().value_or(true),
      "fsdp: unit '",
      name,
      "': reshard_after_forward_to(",
      ranks.value_or(0),
      ") contradicts reshard_after_forward(false). Leave one of them out.");
}

UnitSpec spec_of(
    const std::string& name,
    const UnitOptions& unit,
    const Options& options) {
  UnitSpec spec;
  spec.name = name.empty() ? "(root)" : name;
  spec.strategy = unit.strategy().value_or(options.strategy());
  spec.mixed_precision =
      unit.mixed_precision().value_or(options.mixed_precision());
  check_resharding(spec.name, unit);
  if (spec.strategy == Strategy::kNoShard) {
    return spec;
  }
  const auto part_ranks = unit.reshard_after_forward_to();
  if (part_ranks.has_value() || unit.reshard_after_forward().has_value()) {
    spec.strategy = strategy_with(
        unit.reshard_after_forward().value_or(true), spec.strategy);
  }
  spec.part_ranks = part_ranks.value_or(0);
  return spec;
}

/// Tensors by identity, so that one under several names stays one parameter.
class Collector {
 public:
  explicit Collector(const Options& options) : ignore_(options.ignore()) {}

  /// All tensors, before add(): one that is ignored under one of its names is
  /// ignored.
  void note(const std::string& name, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(
        tensor.defined(), "fsdp: parameter '", name, "' is not defined.");
    const auto [known, fresh] =
        by_name_.emplace(name, tensor.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(
        fresh || known->second == tensor.unsafeGetTensorImpl(),
        "fsdp: two parameters have the name '",
        name,
        "'. Give each its own.");
    if (ignore_.contains(name)) {
      ignored_.insert(tensor.unsafeGetTensorImpl());
    }
  }

  void add(
      UnitSpec& unit,
      const std::string& name,
      const at::Tensor& tensor,
      bool full_precision = false) {
    const auto* identity = tensor.unsafeGetTensorImpl();
    if (ignored_.count(identity) > 0) {
      if (ignored_seen_.insert(identity).second) {
        result_.ignored.emplace_back(name, tensor);
        result_.parameters.emplace_back(name, tensor);
      } else {
        result_.ignored_aliases.emplace_back(name, tensor);
      }
      return;
    }
    const auto known = seen_.find(identity);
    if (known != seen_.end()) {
      auto& parameter = known->second.first->parameters[known->second.second];
      parameter.names.push_back(name);
      parameter.full_precision = parameter.full_precision || full_precision;
      return;
    }
    result_.parameters.emplace_back(name, tensor);
    seen_.emplace(identity, std::make_pair(&unit, unit.parameters.size()));
    Parameter parameter;
    parameter.tensor = tensor;
    parameter.names = {name};
    parameter.full_precision = full_precision;
    unit.parameters.push_back(std::move(parameter));
  }

  void add_buffers(
      const UnitSpec& unit,
      const torch::nn::Module& module,
      bool full_precision) {
    const auto dtype = unit.mixed_precision.buffer_dtype;
    if (dtype.has_value() && !full_precision) {
      add_buffer_casts(result_.buffer_casts, module, *dtype);
    }
  }

  ModuleUnits finish(std::vector<UnitSpec> units) {
    ignore_.check_all_used();
    std::erase_if(
        units, [](const UnitSpec& unit) { return unit.parameters.empty(); });
    result_.units = std::move(units);
    return std::move(result_);
  }

 private:
  ModuleUnits result_;
  IgnoreList ignore_;
  std::unordered_map<const c10::TensorImpl*, std::pair<UnitSpec*, size_t>>
      seen_;
  std::unordered_map<std::string, const c10::TensorImpl*> by_name_;
  std::unordered_set<const c10::TensorImpl*> ignored_;
  std::unordered_set<const c10::TensorImpl*> ignored_seen_;
};

/// Calls visit(node, name, tensor) for all parameters of the tree.
template <class F>
void each_parameter_of(Tree& tree, F&& visit) {
  for (const auto& node : tree.nodes()) {
    for (const auto& parameter :
         node.module->named_parameters(/*recurse=*/false)) {
      if (parameter.value().defined()) {
        visit(node, join(node.name, parameter.key()), parameter.value());
      }
    }
  }
}

} // namespace

ModuleUnits units_of(torch::nn::Module& module, const Options& options) {
  Tree tree(module);
  const UnitChooser chooser(tree, options.units());
  std::vector<UnitSpec> units;
  for (const auto& choice : chooser.choices()) {
    units.push_back(spec_of(choice.name, choice.options, options));
  }
  const auto full = modules_of(module, options.full_precision());
  Collector collector(options);
  each_parameter_of(
      tree,
      [&](const Node&, const std::string& name, const at::Tensor& tensor) {
        collector.note(name, tensor);
      });
  each_parameter_of(
      tree,
      [&](const Node& node, const std::string& name, const at::Tensor& tensor) {
        const bool full_precision = full.count(node.module) > 0;
        collector.add(units[node.unit], name, tensor, full_precision);
      });
  for (const auto& node : tree.nodes()) {
    collector.add_buffers(
        units[node.unit], *node.module, full.count(node.module) > 0);
  }
  return collector.finish(std::move(units));
}

ModuleUnits units_of(
    std::vector<
        std::pair<std::string, std::vector<std::pair<std::string, at::Tensor>>>>
        units,
    const Options& options) {
  TORCH_CHECK_VALUE(
      options.units().rules().empty() && options.ignore().empty() &&
          options.full_precision().rules().empty(),
      "fsdp: ShardedTensors is given its units: Options::units, ignore and"
      " full_precision must be empty.");
  std::vector<UnitSpec> specs;
  for (const auto& [name, tensors] : units) {
    specs.push_back(spec_of(name, UnitOptions(), options));
  }
  Collector collector(options);
  for (const auto& [unit, tensors] : units) {
    for (const auto& [name, tensor] : tensors) {
      collector.note(name, tensor);
    }
  }
  for (const auto i : c10::irange(units.size())) {
    for (const auto& [name, tensor] : units[i].second) {
      collector.add(specs[i], name, tensor);
    }
  }
  return collector.finish(std::move(specs));
}

} // namespace fsdp::detail
