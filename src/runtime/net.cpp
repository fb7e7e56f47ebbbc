#include "runtime/net.h"

#include "runtime/arrival_hook.h"
#include "runtime/backward_engine.h"
#include "runtime/errors.h"

#include <c10/util/irange.h>

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

namespace fsdp::detail {

std::shared_ptr<Net>
Net::make(World world, std::vector<UnitSpec> specs, NetSettings settings) {
  std::shared_ptr<Net> net(new Net(std::move(world), settings));
  net->build(std::move(specs));
  install_backward_engine();
  return net;
}

namespace {

uint64_t next_id() {
  static std::atomic<uint64_t> id{0};
  return id++;
}

} // namespace

Net::Net(World world, NetSettings settings)
    : world_(std::move(world)),
      settings_(settings),
      id_(next_id()) {
  communicate([&] {
    auto& communicator = world_.communicator();
    report_communicator_ = communicator.split(0, communicator.rank());
  });
}

Net::~Net() {
  each_group([](FlatGroup& group) { remove_arrival_hooks(group); });
}

void Net::build(std::vector<UnitSpec> specs) {
  const bool any_cast =
      std::any_of(specs.begin(), specs.end(), [](const UnitSpec& spec) {
        return spec.mixed_precision.param_dtype.has_value();
      });
  make_meshes(specs);
  for (auto& spec : specs) {
    add_unit(std::move(spec), any_cast);
  }
  schedule_ = std::make_unique<Schedule>(units_.size(), settings_.slots);
  share_weights();
  reserve_memory();
  std::vector<FlatGroup*> groups;
  each_group([&](FlatGroup& group) {
    group.attach(group.unit(), groups.size());
    groups.push_back(&group);
    install_arrival_hooks(group);
  });
  reducer_ = std::make_unique<Reducer>(
      groups, report_communicator_, settings_.divide_factor);
}

void Net::make_meshes(const std::vector<UnitSpec>& specs) {
  auto& world = world_.communicator();
  meshes_.push_back(Mesh::of_world(world));
  const bool hybrid =
      std::any_of(specs.begin(), specs.end(), [](const UnitSpec& spec) {
        return is_hybrid(spec.strategy);
      });
  if (hybrid) {
    meshes_.push_back(
        Mesh::of_groups(world, static_cast<int>(settings_.shard_size)));
  }
  for (const auto& spec : specs) {
    if (spec.part_ranks > 0) {
      meshes_[is_hybrid(spec.strategy) ? 1 : 0]->add_part(
          world, spec.part_ranks);
    }
  }
}

const Mesh& Net::mesh_of(Strategy strategy) const {
  return *meshes_.at(is_hybrid(strategy) ? 1 : 0);
}

void Net::add_unit(UnitSpec spec, bool any_cast) {
  // Flat groups in the order in which their first parameter was registered.
  using Kind = std::tuple<at::ScalarType, bool, bool>;
  std::vector<std::pair<Kind, std::vector<Parameter>>> by_kind;
  for (auto& parameter : spec.parameters) {
    const Kind kind(
        parameter.tensor.scalar_type(),
        parameter.tensor.requires_grad(),
        parameter.full_precision);
    auto found = std::find_if(by_kind.begin(), by_kind.end(), [&](auto& each) {
      return each.first == kind;
    });
    if (found == by_kind.end()) {
      found = by_kind.insert(by_kind.end(), {kind, {}});
    }
    found->second.push_back(std::move(parameter));
  }
  auto unit = std::make_unique<Unit>();
  unit->name = spec.name;
  unit->index = static_cast<uint32_t>(units_.size());
  unit->strategy = spec.strategy;
  for (auto& [kind, parameters] : by_kind) {
    GroupSettings settings;
    settings.unit_name = spec.name;
    settings.rank = world_.rank();
    settings.world_size = world_.size();
    settings.strategy = spec.strategy;
    settings.mixed_precision = spec.mixed_precision;
    settings.part_ranks = spec.part_ranks;
    settings.cast_inputs = any_cast && spec.mixed_precision.cast_inputs &&
        at::isFloatingType(std::get<0>(kind));
    if (std::get<2>(kind)) {
      settings.mixed_precision.param_dtype = std::nullopt;
    }
    unit->groups.push_back(std::make_unique<FlatGroup>(
        *this,
        std::move(settings),
        std::move(parameters),
        mesh_of(spec.strategy)));
    unit->groups.back()->attach(*unit, 0);
  }
  units_.push_back(std::move(unit));
}

void Net::share_weights() {
  for (const auto& mesh : meshes_) {
    std::vector<int64_t> slice_bytes;
    each_group([&](const FlatGroup& group) {
      if (&group.mesh() == mesh.get()) {
        slice_bytes.push_back(group.shareable_bytes());
      }
    });
    mesh->share_weights(slice_bytes);
    size_t next = 0;
    each_group([&](FlatGroup& group) {
      if (&group.mesh() == mesh.get()) {
        group.take_parameters(next++);
      }
    });
  }
}

void Net::reserve_memory() {
  for (const auto& mesh : meshes_) {
    int64_t largest = 0;
    each_group([&](const FlatGroup& group) {
      if (&group.mesh() == mesh.get()) {
        largest = std::max(
            largest,
            group.layout().total_numel() *
                static_cast<int64_t>(c10::elementSize(group.reduce_dtype())));
      }
    });
    communicate([&] {
      mesh->reduce->reserve(largest);
      if (mesh->replicas != nullptr) {
        mesh->replicas->reserve(largest / mesh->shards);
      }
    });
  }
}

std::string Net::rank_text() const {
  return detail::rank_text(world_.rank(), world_.size());
}

// Touches.

bool Net::keeps_whole(const Unit& unit) const {
  return unit.stays_whole() ||
      (keeps_for_backward(unit.strategy) && backward_depth_ == 0 &&
       records_graph_);
}

KeepPart Net::keeps_part() const {
  if (backward_depth_ > 0) {
    return KeepPart::kOld;
  }
  return records_graph_ && !ran_backward_ ? KeepPart::kYes : KeepPart::kNo;
}

void Net::begin_pass(PassKind kind) {
  for (const auto& unit : units_) {
    schedule_->set_whole(unit->index, unit->is_gathered());
    schedule_->keep(unit->index, unit->is_plain() || keeps_whole(*unit));
  }
  schedule_->begin_pass(kind);
}

void Net::carry_out(const Decision& decision) {
  if (decision.empty()) {
    return;
  }
  for (const auto unit : decision.release) {
    units_[unit]->release(keeps_part());
  }
  for (const auto* started : {&decision.gather, &decision.prefetch}) {
    for (const auto unit : *started) {
      units_[unit]->start_gather();
      ++gathers_;
    }
  }
}

void Net::touch(std::span<FlatGroup* const> groups) {
  const std::lock_guard lock(mutex_);
  go_on_after_failed_pass();
  if (broken_) {
    TORCH_CHECK_WITH(DistBackendError, false, *broken_);
  }
  note_units(groups);
  try {
    carry_out(schedule_->touch(touched_));
    for (const auto* group : groups) {
      if (!group->unit().is_whole()) {
        group->unit().finish_gather();
        note_peak();
      }
    }
  } catch (const std::exception& error) {
    broken_ = text_of(error);
    schedule_->unpin(touched_);
    throw;
  }
}

void Net::unpin(std::span<FlatGroup* const> groups) {
  const std::lock_guard lock(mutex_);
  note_units(groups);
  schedule_->unpin(touched_);
}

void Net::note_units(std::span<FlatGroup* const> groups) {
  touched_.clear();
  for (const auto* group : groups) {
    touched_.push_back(group->unit().index);
  }
}

void Net::set_prefetch(
    PassKind kind,
    const std::string& unit,
    const std::vector<std::string>& ahead) {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> units;
  for (const auto& name : ahead) {
    units.push_back(unit_named(name).index);
  }
  schedule_->set_prefetch(kind, unit_named(unit).index, std::move(units));
}

const Unit& Net::unit_named(const std::string& name) const {
  std::string names;
  for (const auto& unit : units_) {
    if (unit->name == name) {
      return *unit;
    }
    names += (names.empty() ? "'" : ", '") + unit->name + "'";
  }
  TORCH_CHECK_VALUE(
      false,
      "fsdp: there is no unit '",
      name,
      "' (",
      rank_text(),
      "). The net has the units ",
      names,
      ".");
}

void Net::mark_written(FlatGroup& group) {
  const std::lock_guard lock(mutex_);
  group.prepare_write();
}

void Net::shard_written(FlatGroup& group) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      depth_ == 0 || !group.is_shared(),
      "fsdp: a shard of unit '",
      group.settings().unit_name,
      "' is written inside of a region (",
      rank_text(),
      "), where other ranks may read it. Write to the whole parameter, or after"
      " the region has closed.");
  if (depth_ == 0) {
    make_weights_writable("write to a shard");
    group.unit().discard(); // copies that were kept whole are stale
  }
}

void Net::unshard() {
  const std::lock_guard lock(mutex_);
  check_not_aborted();
  note_epochs_outside_of_regions();
  try {
    publish_weights();
    for (const auto& unit : units_) {
      unit->held = true;
      unit->gather();
      schedule_->keep(unit->index, true);
      schedule_->set_whole(unit->index, true);
      note_peak();
    }
  } catch (const std::exception& error) {
    for (const auto& unit : units_) {
      unit->held = false;
      if (depth_ == 0) {
        unit->discard();
      }
    }
    if (depth_ == 0) {
      abandon(text_of(error));
    } else {
      broken_ = text_of(error);
    }
    throw;
  }
}

void Net::reshard() {
  const std::lock_guard lock(mutex_);
  for (const auto& unit : units_) {
    unit->held = false;
    if (depth_ == 0) {
      unit->release();
    }
    schedule_->keep(unit->index, unit->is_plain() || keeps_whole(*unit));
  }
}

void Net::open_whole() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      !whole_open_ && !in_region(),
      "fsdp: whole_parameters() inside of a region, or of another one (",
      rank_text(),
      "). Close it first.");
  check_not_aborted();
  note_epochs();
  try {
    make_weights_writable("whole_parameters");
    each_group([](FlatGroup& group) { group.adopt_replaced(); });
    each_group([](FlatGroup& group) { group.open_whole(); });
  } catch (const std::exception& error) {
    each_group([](FlatGroup& group) { group.close_whole(Writes::kDrop); });
    abandon(text_of(error));
    throw;
  }
  whole_open_ = true;
  note_peak();
}

void Net::close_whole(Writes writes) {
  const std::lock_guard lock(mutex_);
  whole_open_ = false;
  std::exception_ptr error;
  each_group([&](FlatGroup& group) {
    try {
      group.close_whole(writes); // still writable: no region was opened
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  });
  if (error) {
    std::rethrow_exception(error);
  }
}

// Gradients.

void Net::gradient_arrived(
    FlatGroup& group,
    int64_t index,
    const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  reducer_->add(group.index(), index, gradient, no_sync_ == 0 && depth_ > 0);
}

void Net::drop_unreduced_gradients() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      backward_depth_ == 0,
      "fsdp: drop_unreduced_gradients() inside of a backward pass (",
      rank_text(),
      ").");
  reducer_->give_up();
}

// Memory.

int64_t Net::unreduced_bytes() const {
  return reducer_->unreduced_bytes();
}

int64_t Net::gathered_bytes() const {
  int64_t bytes = 0;
  each_group([&](FlatGroup& group) { bytes += group.gathered_bytes(); });
  return bytes;
}

void Net::note_peak() {
  peak_gathered_bytes_ = std::max(peak_gathered_bytes_, gathered_bytes());
}

} // namespace fsdp::detail
