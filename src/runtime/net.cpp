#include "runtime/net.h"

#include "runtime/arrival_hook.h"
#include "runtime/backward_engine.h"
#include "runtime/errors.h"

#include <c10/util/irange.h>

#include <algorithm>
#include <atomic>
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
  // Gathers, reductions and reports are three sequences that each rank calls in
  // the same order by itself, but not always interleaved in the same way.
  communicate([&] {
    auto& communicator = world_.communicator();
    gather_communicator_ = communicator.split(0, communicator.rank());
    reduce_communicator_ = communicator.split(0, communicator.rank());
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
  for (auto& spec : specs) {
    add_unit(std::move(spec), any_cast);
  }
  share_weights();
  reserve_memory();
  std::vector<FlatGroup*> groups;
  each_group([&](FlatGroup& group) {
    group.attach(group.unit(), groups.size());
    groups.push_back(&group);
    install_arrival_hooks(group);
  });
  reducer_ = std::make_unique<Reducer>(
      groups,
      reduce_communicator_,
      report_communicator_,
      settings_.divide_factor);
}

void Net::add_unit(UnitSpec spec, bool any_cast) {
  // Flat groups in the order in which their first parameter was registered.
  std::vector<
      std::pair<std::pair<at::ScalarType, bool>, std::vector<Parameter>>>
      by_kind;
  for (auto& parameter : spec.parameters) {
    const auto kind = std::make_pair(
        parameter.tensor.scalar_type(), parameter.tensor.requires_grad());
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
  unit->strategy = spec.strategy;
  for (auto& [kind, parameters] : by_kind) {
    GroupSettings settings;
    settings.unit_name = spec.name;
    settings.rank = world_.rank();
    settings.world_size = world_.size();
    settings.strategy = spec.strategy;
    settings.mixed_precision = spec.mixed_precision;
    settings.cast_inputs = any_cast && spec.mixed_precision.cast_inputs &&
        at::isFloatingType(kind.first);
    unit->groups.push_back(std::make_unique<FlatGroup>(
        *this,
        std::move(settings),
        std::move(parameters),
        gather_communicator_));
    unit->groups.back()->attach(*unit, 0);
  }
  units_.push_back(std::move(unit));
}

void Net::share_weights() {
  std::vector<int64_t> slice_bytes;
  int64_t sum = 0;
  each_group([&](FlatGroup& group) {
    slice_bytes.push_back(group.shareable_bytes());
    sum += slice_bytes.back();
  });
  communicate([&] {
    auto slices =
        sum > 0 ? gather_communicator_->share_slices(slice_bytes) : nullptr;
    if (slices != nullptr) {
      shared_ = std::make_unique<SharedWeights>(std::move(slices));
    }
  });
  size_t next = 0;
  each_group(
      [&](FlatGroup& group) { group.take_parameters(shared_.get(), next++); });
}

void Net::reserve_memory() {
  int64_t largest = 0;
  each_group([&](const FlatGroup& group) {
    largest = std::max(
        largest,
        group.layout().total_numel() *
            static_cast<int64_t>(c10::elementSize(group.reduce_dtype())));
  });
  communicate([&] { reduce_communicator_->reserve(largest); });
}

std::string Net::rank_text() const {
  return detail::rank_text(world_.rank(), world_.size());
}

// Touches.

bool Net::keeps_whole(const Unit& unit) const {
  return unit.held ||
      (unit.strategy == Strategy::kShardGradOp && backward_depth_ == 0 &&
       records_graph_);
}

void Net::make_room(const std::vector<Unit*>& needed) {
  std::vector<Unit*> whole;
  for (const auto& unit : units_) {
    if (unit->is_whole() && !keeps_whole(*unit) && unit->pins == 0 &&
        std::find(needed.begin(), needed.end(), unit.get()) == needed.end()) {
      whole.push_back(unit.get());
    }
  }
  std::sort(whole.begin(), whole.end(), [](const Unit* a, const Unit* b) {
    return a->last_touch < b->last_touch;
  });
  const auto slots = static_cast<size_t>(std::max<int64_t>(settings_.slots, 1));
  const auto keep = needed.size() >= slots ? 0 : slots - needed.size();
  for (size_t i = 0; i + keep < whole.size(); ++i) {
    whole[i]->release();
  }
}

void Net::touch(std::span<FlatGroup* const> groups) {
  const std::lock_guard lock(mutex_);
  go_on_after_failed_pass();
  if (broken_) {
    TORCH_CHECK_WITH(DistBackendError, false, *broken_);
  }
  std::vector<Unit*> needed;
  bool all_whole = true;
  for (auto* group : groups) {
    auto& unit = group->unit();
    if (std::find(needed.begin(), needed.end(), &unit) == needed.end()) {
      needed.push_back(&unit);
      all_whole = all_whole && unit.is_whole();
    }
  }
  if (!all_whole) {
    make_room(needed);
  }
  for (auto* unit : needed) {
    unit->last_touch = ++clock_;
    if (unit->is_whole()) {
      continue;
    }
    try {
      unit->gather();
    } catch (const std::exception& error) {
      broken_ = text_of(error);
      throw;
    }
    ++gathers_;
    note_peak();
  }
  for (auto* group : groups) {
    ++group->unit().pins;
  }
}

void Net::unpin(std::span<FlatGroup* const> groups) {
  const std::lock_guard lock(mutex_);
  for (auto* group : groups) {
    auto& pins = group->unit().pins;
    pins = std::max(0, pins - 1);
  }
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
