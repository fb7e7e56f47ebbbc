#include <fsdp/sharded_module.h>

#include "api/agreement.h"
#include "api/module_units.h"
#include "api/precision.h"
#include "api/strategy_name.h"
#include "launch/settings.h"
#include "launch/variables.h"
#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/mesh.h"
#include "runtime/net.h"
#include "runtime/tensor_bytes.h"
#include "runtime/view_base.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <cmath>
#include <stdexcept>
#include <unordered_map>

namespace fsdp {

namespace {

using detail::FlatGroup;
using detail::Parameter;
using detail::rank_text;

template <class F>
void each_group(const detail::Net& net, F&& visit) {
  for (const auto& unit : net.units()) {
    for (const auto& group : unit->groups) {
      visit(*group);
    }
  }
}

void check_parameter(const Parameter& parameter, const World& world) {
  const auto& tensor = parameter.tensor;
  const auto who = "fsdp: parameter '" + parameter.name() + "' (" +
      rank_text(world.rank(), world.size()) + ") ";
  TORCH_CHECK_VALUE(
      tensor.layout() == c10::kStrided,
      who,
      "must be a dense tensor, but has layout ",
      tensor.layout(),
      ".");
  TORCH_CHECK_VALUE(
      tensor.is_leaf(),
      who,
      "must be a leaf, but was computed by an operator that autograd"
      " recorded. Make it under torch::NoGradGuard, or detach() it.");
  TORCH_CHECK_VALUE(
      !tensor.grad().defined(),
      who,
      "has a gradient already. Call zero_grad() before it is sharded.");
  TORCH_CHECK_VALUE(
      detail::unit_storage(tensor) == nullptr ||
          detail::unit_storage(tensor)->tag->group.load() == nullptr,
      who,
      "is sharded already. A module is sharded once.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.is_cpu() || world.size() == 1,
      who,
      "is on ",
      tensor.device(),
      ", but this communicator moves CPU memory"
      " only.");
}

template <class F>
void each_parameter(const std::vector<detail::UnitSpec>& units, F&& visit) {
  for (const auto& unit : units) {
    for (const auto& parameter : unit.parameters) {
      visit(parameter);
    }
  }
}

/// Two tensors on one storage would each get their own shard, and come apart; a
/// view that somebody holds would keep the values of now.
void check_storages(
    const std::vector<detail::UnitSpec>& units,
    const World& world) {
  std::unordered_map<const c10::StorageImpl*, std::string> owners;
  each_parameter(units, [&](const Parameter& parameter) {
    check_parameter(parameter, world);
    if (parameter.tensor.numel() == 0) {
      return;
    }
    const auto [owner, fresh] = owners.emplace(
        parameter.tensor.storage().unsafeGetStorageImpl(), parameter.name());
    TORCH_CHECK_VALUE(
        fresh,
        "fsdp: parameters '",
        owner->second,
        "' and '",
        parameter.name(),
        "' share one storage but are two tensors, so sharding would untie them."
        " Register the same tensor at both places.");
  });
  each_parameter(units, [&](const Parameter& parameter) {
    TORCH_CHECK_VALUE(
        parameter.tensor.numel() == 0 ||
            detail::is_sole_user_of_storage(parameter.tensor),
        "fsdp: somebody else holds a view of parameter '",
        parameter.name(),
        "' (",
        rank_text(world.rank(), world.size()),
        "), which would keep the"
        " values of now for ever. Make the view after sharding, where it is"
        " used, or clone() it.");
  });
}

/// LIBFSDP_STRATEGY wins over the program, so that strategies can be compared
/// without building it again. Units that have their own keep it.
Options with_strategy_of_environment(Options options) {
  try {
    const auto wanted =
        detail::read_settings(detail::process_environment()).strategy;
    for (const auto& [strategy, name] : detail::kStrategyNames) {
      if (wanted == name) {
        options.strategy(strategy);
      }
    }
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return options;
}

void check_options(const Options& options) {
  const auto factor = options.gradient_divide_factor().value_or(1.0);
  TORCH_CHECK_VALUE(
      std::isfinite(factor) && factor != 0.0,
      "fsdp: Options::gradient_divide_factor must be a number other than 0, but"
      " got ",
      factor,
      ". Use 1 to keep the sum of the gradients.");
  TORCH_CHECK_VALUE(
      options.slots() >= 1,
      "fsdp: Options::slots must be at least 1, but got ",
      options.slots(),
      ".");
}

/// That the groups of ranks which units ask for can be made.
void check_meshes(
    const std::vector<detail::UnitSpec>& units,
    const Options& options,
    const World& world) {
  for (const auto& unit : units) {
    const bool hybrid = detail::is_hybrid(unit.strategy);
    const auto size = options.shard_size();
    TORCH_CHECK_VALUE(
        !hybrid || (size && *size >= 1 && world.size() % *size == 0),
        "fsdp: unit '",
        unit.name,
        "' has a hybrid strategy: expected Options::shard_size to divide the"
        " world size ",
        world.size(),
        ", but it is ",
        size ? std::to_string(*size) : "not set",
        ". Set it to the number of ranks per host.");
    const auto ranks = hybrid ? *size : world.size();
    TORCH_CHECK_VALUE(
        unit.part_ranks == 0 || ranks % unit.part_ranks == 0,
        "fsdp: unit '",
        unit.name,
        "': expected reshard_after_forward_to to divide the number of ranks"
        " that share the unit, ",
        ranks,
        ", but got ",
        unit.part_ranks,
        ".");
  }
}

std::vector<std::pair<std::string, at::Tensor>> all_tensors(
    const std::vector<detail::UnitSpec>& units,
    const std::vector<std::pair<std::string, at::Tensor>>& ignored,
    torch::nn::Module* module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& unit : units) {
    for (const auto& parameter : unit.parameters) {
      tensors.emplace_back(parameter.name(), parameter.tensor);
    }
  }
  tensors.insert(tensors.end(), ignored.begin(), ignored.end());
  if (module != nullptr) {
    for (const auto& buffer : module->named_buffers()) {
      if (buffer.value().defined()) {
        tensors.emplace_back(buffer.key(), buffer.value());
      }
    }
  }
  return tensors;
}

std::shared_ptr<detail::Net> make_net(
    const World& world,
    detail::ModuleUnits& units,
    torch::nn::Module* module,
    const Options& options) {
  detail::NetSettings settings;
  settings.divide_factor =
      options.gradient_divide_factor().value_or(world.size());
  settings.slots = options.slots();
  settings.shard_size = options.shard_size().value_or(0);
  detail::check_agreement(
      world,
      units.units,
      settings,
      options.sync_module_states() ? detail::CompareValues::kNo
                                   : detail::CompareValues::kYes);
  if (options.sync_module_states()) {
    detail::broadcast_tensors(
        world, all_tensors(units.units, units.ignored, module));
  }
  return detail::Net::make(world, std::move(units.units), settings);
}

} // namespace

ShardedModule::ShardedModule(ShardedModule&&) noexcept = default;
ShardedModule& ShardedModule::operator=(ShardedModule&&) noexcept = default;
ShardedModule::~ShardedModule() = default;

void ShardedModule::shard_module(
    const std::shared_ptr<torch::nn::Module>& module,
    World world,
    const Options& options) {
  shard(
      [&](const Options& chosen) {
        TORCH_CHECK_VALUE(
            module != nullptr,
            "fsdp: the module to shard is null. Construct it first.");
        return detail::units_of(*module, chosen);
      },
      module.get(),
      world,
      options);
}

void ShardedModule::shard_tensors(
    NamedUnits named,
    World world,
    const Options& options) {
  shard(
      [&](const Options& chosen) {
        return detail::units_of(std::move(named), chosen);
      },
      nullptr,
      world,
      options);
}

template <class F>
void ShardedModule::shard(
    F&& choose_units,
    torch::nn::Module* module,
    const World& world,
    const Options& options) {
  Options chosen;
  detail::ModuleUnits units;
  detail::fail_together(world, [&] {
    chosen = with_strategy_of_environment(options);
    check_options(chosen);
    units = choose_units(chosen);
    check_meshes(units.units, chosen, world);
    check_storages(units.units, world);
  });
  net_ = make_net(world, units, module, chosen);
  detail::cast_buffers(units.buffer_casts);
  output_dtype_ = chosen.mixed_precision().output_dtype;
  parameters_ = std::move(units.parameters);
  ignored_ = std::move(units.ignored);
  ignored_aliases_ = std::move(units.ignored_aliases);
}

const std::shared_ptr<detail::Net>& ShardedModule::net() const {
  TORCH_CHECK_VALUE(
      net_ != nullptr, "fsdp: this net was moved from or unwrapped.");
  return net_;
}

std::vector<at::Tensor> ShardedModule::parameters() const {
  net(); // throws when there is none
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters_) {
    tensors.push_back(tensor);
  }
  return tensors;
}

std::vector<std::pair<std::string, at::Tensor>>
ShardedModule::named_parameters() const {
  net();
  return parameters_;
}

std::vector<int64_t> ShardedModule::full_sizes(const std::string& name) const {
  std::vector<int64_t> sizes;
  bool found = false;
  each_group(*net(), [&](const FlatGroup& group) {
    for (const auto& parameter : group.parameters()) {
      for (const auto& each : parameter.names) {
        if (each == name) {
          sizes = parameter.sizes;
          found = true;
        }
      }
    }
  });
  for (const auto* list : {&ignored_, &ignored_aliases_}) {
    for (const auto& [each, tensor] : *list) {
      if (each == name) {
        sizes = tensor.sizes().vec();
        found = true;
      }
    }
  }
  TORCH_CHECK_VALUE(
      found,
      "fsdp: full_sizes: there is no parameter '",
      name,
      "'. describe() lists the names.");
  return sizes;
}

const World& ShardedModule::world() const {
  return net()->world();
}

at::Tensor ShardedModule::output_of(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.is_floating_point()
      ? tensor.to(*output_dtype_)
      : tensor;
}

namespace {

/// Nets of one rank need no communicator, and would not notice by themselves
/// that their world was shut down.
const std::shared_ptr<detail::Net>& in_use(
    const std::shared_ptr<detail::Net>& net) {
  static_cast<void>(net->world().communicator());
  return net;
}

} // namespace

Region ShardedModule::region() {
  return Region(in_use(net()));
}

NoSync ShardedModule::no_sync() {
  return NoSync(in_use(net()));
}

WholeParameters ShardedModule::whole_parameters(
    WholeParametersOptions options) {
  return WholeParameters(in_use(net()), options);
}

void ShardedModule::drop_unreduced_gradients() {
  net()->drop_unreduced_gradients();
}

void ShardedModule::set_forward_prefetch(
    const std::string& unit,
    const std::vector<std::string>& ahead) {
  net()->set_prefetch(detail::PassKind::kForward, unit, ahead);
}

void ShardedModule::set_backward_prefetch(
    const std::string& unit,
    const std::vector<std::string>& ahead) {
  net()->set_prefetch(detail::PassKind::kBackward, unit, ahead);
}

void ShardedModule::unshard() {
  in_use(net())->unshard();
}

void ShardedModule::reshard() {
  net()->reshard();
}

void ShardedModule::unwrap_parameters() {
  std::vector<std::pair<at::Tensor, at::Tensor>> whole;
  {
    const auto scope = whole_parameters();
    const detail::InternalGuard internal;
    each_group(*net(), [&](const FlatGroup& group) {
      for (const auto& parameter : group.parameters()) {
        whole.emplace_back(parameter.tensor, parameter.tensor.clone());
      }
    });
  }
  net_.reset();
  const detail::InternalGuard internal;
  for (auto& [tensor, value] : whole) {
    tensor.mutable_grad().reset();
    tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
  }
}

void ShardedModule::average_ignored_gradients() {
  net(); // throws when there is none
  const detail::InternalGuard internal;
  for (const auto& [name, tensor] : ignored_) {
    if (!tensor.requires_grad()) {
      continue;
    }
    auto& grad = tensor.mutable_grad();
    auto sum = grad.defined() ? grad.to(at::kDouble).contiguous()
                              : at::zeros(tensor.sizes(), at::kDouble);
    auto present = at::full({1}, grad.defined() ? 1.0 : 0.0, at::kDouble);
    for (auto* each : {&present, &sum}) {
      detail::communicate([&] {
        world()
            .communicator()
            .all_reduce(
                detail::bytes_of(*each),
                DType::kFloat64,
                ReduceOp::kSum,
                "gradient of ignored parameter '" + name + "'")
            ->wait();
      });
    }
    if (present.item<double>() > 0.0) {
      grad = sum.div_(world().size()).to(tensor.scalar_type());
    }
  }
}

void ShardedModule::check_replicas() const {
  const auto line = [](const std::string& name, const at::Tensor& tensor) {
    return "parameter '" + name + "' with values of checksum " +
        std::to_string(detail::checksum(tensor));
  };
  std::vector<std::string> whole;
  std::vector<std::string> shards; // that other groups of ranks hold, too
  int position = 0;                // of this rank in its group
  each_group(*net(), [&](const FlatGroup& group) {
    const bool hybrid = group.mesh().replicas != nullptr;
    for (const auto& parameter : group.parameters()) {
      if (group.replicated() || hybrid) {
        (hybrid ? shards : whole)
            .push_back(line(parameter.name(), parameter.tensor));
      }
    }
    position = hybrid ? group.position() : position;
  });
  for (const auto& [name, tensor] : ignored_) {
    whole.push_back(line(name, tensor));
  }
  const std::string advice =
      "Replicated parameters have drifted apart: were the gradients of ignored"
      " parameters averaged, and does every rank take the same steps?";
  detail::check_same_lines(world(), whole, advice);
  detail::check_same_lines(world(), shards, advice, position);
}

MemoryReport ShardedModule::memory() const {
  MemoryReport report;
  each_group(*net(), [&](const FlatGroup& group) {
    report.shard_bytes += group.shard_bytes();
    for (const auto i : c10::irange(group.layout().size())) {
      const auto& parameter = group.parameters()[i];
      const auto& grad = parameter.tensor.grad();
      report.gradient_bytes +=
          grad.defined() ? static_cast<int64_t>(grad.nbytes()) : 0;
      report.whole_model_bytes += group.layout().interval(i).numel() *
          static_cast<int64_t>(c10::elementSize(group.dtype()));
    }
  });
  report.unreduced_gradient_bytes = net()->unreduced_bytes();
  report.gathered_bytes = net()->gathered_bytes();
  report.peak_gathered_bytes = net()->peak_gathered_bytes();
  return report;
}

void ShardedModule::reset_peak_memory() {
  net()->reset_peak();
}

int64_t ShardedModule::gathers() const {
  return net()->gathers();
}

NetDescription ShardedModule::describe() const {
  NetDescription net_description;
  net_description.rank = world().rank();
  net_description.world_size = world().size();
  for (const auto& unit : net()->units()) {
    NetDescription::Unit description;
    description.name = unit->name;
    description.strategy = unit->strategy;
    for (const auto& group : unit->groups) {
      description.shard_bytes += group->shard_bytes();
      description.whole_bytes += group->layout().total_numel() *
          static_cast<int64_t>(c10::elementSize(group->compute_dtype()));
      for (const auto i : c10::irange(group->layout().size())) {
        const auto& parameter = group->parameters()[i];
        description.parameters.push_back(
            {parameter.names,
             parameter.sizes,
             group->dtype(),
             parameter.tensor.requires_grad(),
             group->layout().owned_of_parameter(i, group->position()).numel()});
      }
    }
    net_description.units.push_back(std::move(description));
  }
  return net_description;
}

} // namespace fsdp
