#include "runtime/flat_group.h"

#include "comm/shared_weights.h"
#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/mesh.h"
#include "runtime/tensor_bytes.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <exception>

namespace fsdp::detail {

namespace {

std::vector<int64_t> numels_of(const std::vector<Parameter>& parameters) {
  std::vector<int64_t> numels;
  numels.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    numels.push_back(parameter.tensor.numel());
  }
  return numels;
}

/// Exchanges the contents of a parameter. Unlike set_data this keeps its
/// version counter and its gradient accumulator, whatever the dtypes are.
void switch_to(const at::Tensor& parameter, const at::Tensor& contents) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(
      contents.getIntrusivePtr());
}

} // namespace

FlatGroup::FlatGroup(
    Net& net,
    GroupSettings settings,
    std::vector<Parameter> parameters,
    const Mesh& mesh)
    : net_(net),
      settings_(std::move(settings)),
      parameters_(std::move(parameters)),
      dtype_(parameters_.front().tensor.scalar_type()),
      compute_dtype_(
          at::isFloatingType(dtype_)
              ? settings_.mixed_precision.param_dtype.value_or(dtype_)
              : dtype_),
      reduce_dtype_(
          at::isFloatingType(dtype_)
              ? settings_.mixed_precision.reduce_dtype.value_or(compute_dtype_)
              : dtype_),
      device_(parameters_.front().tensor.device()),
      layout_(numels_of(parameters_), replicated() ? 1 : mesh.shards),
      tag_(std::make_shared<GroupTag>()),
      const_tag_(tag_),
      mesh_(mesh),
      alias_(layout_.world_size() == 1 && compute_dtype_ == dtype_),
      plain_(replicated() && alias_ && !settings_.cast_inputs),
      released_message_(
          "fsdp: a weight of " + where() +
          " is read while it is not whole: its memory was asked for without an"
          " operator. Call fsdp::touch(weight) first and keep what it returns"
          " while the pointer is used.") {
  for (auto& parameter : parameters_) {
    parameter.sizes = parameter.tensor.sizes().vec();
  }
  const auto part = mesh_.parts.find(settings_.part_ranks);
  if (part != mesh_.parts.end() && layout_.world_size() > 1) {
    part_communicator_ = part->second;
  }
}

int64_t FlatGroup::shareable_bytes() const {
  return layout_.world_size() == 1 ? 0
                                   : layout_.slice_numel() *
          static_cast<int64_t>(c10::elementSize(compute_dtype_));
}

void FlatGroup::take_parameters(size_t buffer) {
  shared_ = shareable_bytes() > 0 ? mesh_.shared.get() : nullptr;
  shared_buffer_ = buffer;
  if (!plain_) {
    copy_in_and_switch();
  }
  tag_->group = this;
}

FlatGroup::~FlatGroup() {
  tag_->group = nullptr;
}

std::vector<int64_t> FlatGroup::sizes_at_rest(int64_t index) const {
  return replicated()
      ? parameters_[index].sizes
      : std::vector<int64_t>{layout_.owned_in_slice(index, position()).numel()};
}

void FlatGroup::allocate_shard() {
  const auto nbytes =
      static_cast<size_t>(layout_.slice_numel()) * c10::elementSize(dtype_);
  if (shard_is_shared()) {
    shard_storage_ = storage_on_slice(
        StorageKind::kShard, const_tag_, shared_->slices(), shared_buffer_);
  } else {
    shard_storage_ =
        allocate_storage(StorageKind::kShard, const_tag_, nbytes, device_);
  }
  shard_ = tensor_on(
      shard_storage_, dtype_, {layout_.slice_numel()}, 0, Touched::kNo);
  shard_.zero_(); // padding too, so that it is never garbage
}

void FlatGroup::copy_in_and_switch() {
  const InternalGuard internal;
  allocate_shard();
  whole_storage_ = c10::make_intrusive<UnitStorage>(
      StorageKind::kWhole,
      const_tag_,
      static_cast<size_t>(layout_.total_numel()) *
          c10::elementSize(compute_dtype_),
      c10::DataPtr(nullptr, device_));
  take_memory(*whole_storage_, released_message_);
  for (const auto i : c10::irange(layout_.size())) {
    auto& parameter = parameters_[i];
    const auto owned = layout_.owned_in_slice(i, position());
    parameter.sharded = tensor_on(
        shard_storage_, dtype_, sizes_at_rest(i), owned.begin, Touched::kYes);
    parameter.whole = tensor_on(
        whole_storage_,
        compute_dtype_,
        parameter.sizes,
        layout_.interval(i).begin,
        Touched::kYes);
    take_over(i, dtype_);
    const auto old = parameter.tensor.storage();
    switch_to(parameter.tensor, parameter.sharded);
    if (old.use_count() > 1) {
      // A parameter that was made as a view keeps its base, and nobody else
      // does.
      old.unsafeGetStorageImpl()->set_data_ptr_noswap(
          c10::DataPtr(nullptr, device_));
      old.unsafeGetStorageImpl()->set_nbytes(0);
    }
  }
}

void FlatGroup::check_plain(const Parameter& parameter) const {
  const auto& tensor = parameter.tensor;
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype_,
      "fsdp: parameter '",
      parameter.name(),
      "' was given another dtype after"
      " sharding (",
      where(),
      "): expected ",
      dtype_,
      ", but got ",
      tensor.scalar_type(),
      ". Convert the model before it is sharded.");
  TORCH_CHECK_VALUE(
      tensor.sizes() == at::IntArrayRef(parameter.sizes),
      "fsdp: parameter '",
      parameter.name(),
      "' was replaced by a tensor of"
      " another size (",
      where(),
      "): expected shape ",
      at::IntArrayRef(parameter.sizes),
      ", but got ",
      tensor.sizes(),
      ".");
}

void FlatGroup::adopt_replaced() {
  for (const auto i : c10::irange(layout_.size())) {
    auto& parameter = parameters_[i];
    if (plain_) {
      check_plain(parameter);
    } else if (unit_storage(parameter.tensor) != shard_storage_.get()) {
      take_over(i, dtype_);
      switch_to(parameter.tensor, parameter.sharded);
      discard(); // a copy that was kept whole is stale
    }
  }
}

void FlatGroup::enter_region() {
  if (plain_) {
    return;
  }
  for (auto& parameter : parameters_) {
    switch_to(parameter.tensor, parameter.whole);
  }
}

void FlatGroup::leave_region(Writes writes) {
  if (plain_) {
    return;
  }
  std::exception_ptr error;
  bool stale = false; // weights that were kept whole
  for (const auto i : c10::irange(layout_.size())) {
    auto& parameter = parameters_[i];
    const bool replaced = // by set_data inside the region
        unit_storage(parameter.tensor) != whole_storage_.get();
    if (replaced && writes == Writes::kKeep) {
      stale = !is_shared();
      try {
        take_over_in_region(i);
      } catch (const std::exception&) {
        error = std::current_exception(); // once all are SHARDED again
      }
    }
    switch_to(parameter.tensor, parameter.sharded);
  }
  if (stale) {
    discard();
  }
  if (writes == Writes::kDrop && wrote_in_region_) {
    undo_writes();
  }
  if (has_writes() && shard_is_shared()) {
    point_to(*shard_storage_, own_slot(gathered_));
  }
  wrote_in_region_ = false;
  shard_before_.reset();
  copy_before_.reset();
  if (error) {
    std::rethrow_exception(error);
  }
}

void FlatGroup::undo_writes() {
  const InternalGuard internal;
  if (is_shared()) {
    discard(); // the storage may point to the copy
    gathered_ = copy_before_;
  }
  if (shard_is_shared()) {
    point_to_shared_slice();
  } else {
    shard_.copy_(shard_before_);
  }
}

bool FlatGroup::has_replaced() const {
  return !plain_ &&
      std::any_of(
          parameters_.begin(), parameters_.end(), [&](const auto& each) {
            return unit_storage(each.tensor) != shard_storage_.get();
          });
}

void FlatGroup::check_replacement(int64_t index, at::ScalarType accepted)
    const {
  const auto& parameter = parameters_[index];
  const auto& value = parameter.tensor;
  const auto owned = layout_.owned_of_parameter(index, position());
  const auto whole_numel = layout_.interval(index).numel();
  TORCH_CHECK_VALUE(
      value.scalar_type() == dtype_ || value.scalar_type() == accepted,
      "fsdp: parameter '",
      parameter.name(),
      "' was given another dtype after"
      " sharding (",
      where(),
      "): expected ",
      dtype_,
      ", but got ",
      value.scalar_type(),
      ". Convert the model before it is sharded.");
  TORCH_CHECK_VALUE(
      value.numel() == whole_numel || value.numel() == owned.numel(),
      "fsdp: parameter '",
      parameter.name(),
      "' was replaced by a tensor of"
      " another size (",
      where(),
      "): expected ",
      whole_numel,
      " elements (whole) or ",
      owned.numel(),
      " (this rank's shard), but got ",
      value.numel(),
      ".");
}

void FlatGroup::take_over(int64_t index, at::ScalarType accepted) {
  const InternalGuard internal;
  check_replacement(index, accepted);
  const auto owned = layout_.owned_of_parameter(index, position());
  if (owned.empty()) {
    return;
  }
  auto flat = parameters_[index].tensor.detach().reshape({-1});
  if (flat.numel() == layout_.interval(index).numel()) {
    flat = flat.narrow(0, owned.begin, owned.numel());
  }
  const auto target = layout_.owned_in_slice(index, position());
  shard_.narrow(0, target.begin, target.numel()).copy_(flat);
}

void FlatGroup::take_over_in_region(int64_t index) {
  check_replacement(index, compute_dtype_);
  if (is_shared()) {
    prepare_write();
  }
  if (!shard_is_shared()) {
    take_over(index, compute_dtype_);
  }
  if (!is_shared()) {
    return;
  }
  const InternalGuard internal;
  const auto flat = parameters_[index].tensor.detach().reshape({-1});
  auto target = layout_.interval(index);
  if (flat.numel() != target.numel()) { // this rank's shard
    const auto owned = layout_.owned_of_parameter(index, position());
    target = {target.begin + owned.begin, target.begin + owned.end};
  }
  gathered_.narrow(0, target.begin, target.numel()).copy_(flat);
}

at::Tensor FlatGroup::own_slot(const at::Tensor& whole) const {
  const auto slice = layout_.slice(position());
  return whole.narrow(0, slice.begin, slice.numel());
}

at::Tensor FlatGroup::part_of(const at::Tensor& whole) const {
  const auto numel = layout_.total_numel() / part_communicator_->size();
  return whole.narrow(0, part_communicator_->rank() * numel, numel);
}

void FlatGroup::keep_part() {
  const InternalGuard internal;
  part_ = part_of(gathered_).clone();
}

void FlatGroup::gather_into(const at::Tensor& whole) {
  const auto& slice = part_.defined() ? part_ : shard_;
  (part_.defined() ? part_of(whole) : own_slot(whole)).copy_(slice);
  if (layout_.world_size() > 1) {
    auto& communicator = part_.defined() ? *part_communicator_ : *mesh_.gather;
    gather_ = communicate([&] {
      return communicator.all_gather(
          bytes_of(whole), "all_gather of unit '" + settings_.unit_name + "'");
    });
  }
}

void FlatGroup::start_gather() {
  if (whole_ || gather_ || alias_ || is_shared() ||
      layout_.total_numel() == 0) {
    return; // nothing to copy
  }
  const InternalGuard internal;
  gathered_ = at::empty(
      {layout_.total_numel()},
      at::TensorOptions(compute_dtype_).device(device_));
  gather_into(gathered_);
}

void FlatGroup::finish_gather() {
  if (whole_ || plain_) {
    return;
  }
  start_gather();
  if (gather_) {
    const auto work = std::move(gather_);
    communicate([&] { work->wait(); });
  }
  if (is_shared()) {
    communicate([&] {
      shared_->await_readable(
          "all_gather of unit '" + settings_.unit_name + "'");
    });
  }
  give_memory(*whole_storage_, whole_data());
  whole_ = true;
  written_ = false;
}

void* FlatGroup::whole_data() const {
  if (layout_.total_numel() == 0) {
    return nullptr;
  }
  if (gathered_.defined()) {
    return gathered_.data_ptr();
  }
  if (is_shared()) { // where a stray write faults
    return const_cast<std::byte*>(
        shared_->slices()->whole(shared_buffer_).data());
  }
  return shard_.data_ptr();
}

void FlatGroup::make_own_copy() {
  if (gathered_.defined()) {
    return;
  }
  communicate([&] {
    shared_->await_readable(
        "copy of unit '" + settings_.unit_name + "', for a write to it");
  });
  const auto shared = shared_->slices()->whole(shared_buffer_);
  gathered_ = at::empty(
      {layout_.total_numel()},
      at::TensorOptions(compute_dtype_).device(device_));
  std::memcpy(gathered_.data_ptr(), shared.data(), shared.size());
  if (whole_) {
    give_memory(*whole_storage_, whole_data());
  }
}

void FlatGroup::prepare_write() {
  const InternalGuard internal;
  if (!wrote_in_region_ && !shard_is_shared()) {
    shard_before_ = shard_.clone();
  }
  if (!wrote_in_region_ && has_writes()) {
    copy_before_ = gathered_.clone();
  }
  if (is_shared()) {
    make_own_copy();
  }
  wrote_in_region_ = true;
  written_ = true;
}

void FlatGroup::take_up_writes() {
  if (!is_shared() || !gathered_.defined()) {
    return;
  }
  discard();
  if (shard_is_shared()) {
    const auto own = shared_->slices()->own(shared_buffer_);
    std::memcpy(own.data(), own_slot(gathered_).data_ptr(), own.size());
    point_to_shared_slice();
  }
  gathered_.reset();
}

void FlatGroup::point_to_shared_slice() {
  shard_storage_->set_data_ptr_noswap(c10::DataPtr(
      shared_->slices()->own(shared_buffer_).data(), shard_storage_->device()));
}

void FlatGroup::refresh_shared_slice() {
  if (!is_shared() || shard_is_shared()) {
    return;
  }
  const InternalGuard internal;
  const auto own = shared_->slices()->own(shared_buffer_);
  at::from_blob(
      own.data(),
      {layout_.slice_numel()},
      at::TensorOptions(compute_dtype_).device(device_))
      .copy_(shard_);
}

void FlatGroup::flush_writes() {
  if (whole_ && written_ && !shard_is_shared()) {
    write_back();
    written_ = false;
  }
}

void FlatGroup::release(KeepPart keep) {
  const bool has_changed = written_;
  flush_writes();
  if (keep == KeepPart::kNo) {
    discard();
    return;
  }
  const bool makes_part = part_communicator_ != nullptr && whole_ &&
      gathered_.defined() && !is_shared();
  if (makes_part && (part_.defined() ? has_changed : keep == KeepPart::kYes)) {
    keep_part();
  }
  drop_whole();
}

void FlatGroup::discard() {
  part_.reset();
  drop_whole();
}

void FlatGroup::drop_whole() {
  if (!whole_ && !gather_ && !gathered_.defined()) {
    return;
  }
  gather_.reset();
  if (whole_) {
    take_memory(*whole_storage_, released_message_);
  }
  if (!is_shared()) {
    gathered_.reset();
  }
  whole_ = false;
  written_ = false;
}

void FlatGroup::write_back() {
  if (!gathered_.defined()) {
    return;
  }
  const InternalGuard internal;
  const auto slot = own_slot(gathered_);
  if (compute_dtype_ == dtype_) {
    shard_.copy_(slot);
    return;
  }
  // Elements that nobody wrote keep the low bits that the cast dropped.
  const auto changed = shard_.to(compute_dtype_).ne(slot);
  shard_.copy_(at::where(changed, slot.to(dtype_), shard_));
}

void FlatGroup::open_whole() {
  const InternalGuard internal;
  part_.reset(); // in the compute dtype, and perhaps older
  whole_at_rest_ = at::empty(
      {layout_.total_numel()}, at::TensorOptions(dtype_).device(device_));
  if (!plain_ && layout_.total_numel() > 0) {
    gather_into(whole_at_rest_);
    if (const auto work = std::move(gather_)) {
      communicate([&] { work->wait(); });
    }
  }
  for (const auto i : c10::irange(layout_.size())) {
    auto& parameter = parameters_[i];
    const auto interval = layout_.interval(i);
    const auto whole =
        whole_at_rest_.narrow(0, interval.begin, interval.numel())
            .view(parameter.sizes);
    if (plain_) {
      whole.copy_(parameter.tensor);
      parameter.sharded = parameter.tensor.detach();
    }
    switch_to(parameter.tensor, whole);
  }
}

void FlatGroup::close_whole(Writes writes) {
  if (!whole_at_rest_.defined()) {
    return;
  }
  const InternalGuard internal;
  std::exception_ptr error;
  for (const auto i : c10::irange(layout_.size())) {
    auto& parameter = parameters_[i];
    try {
      if (writes == Writes::kKeep) {
        if (plain_) {
          check_plain(parameter);
          parameter.sharded.copy_(parameter.tensor);
        } else {
          take_over(i, dtype_);
        }
        torch::autograd::impl::bump_version(parameter.tensor);
      }
    } catch (const std::exception&) {
      error = std::current_exception(); // once all are SHARDED again
    }
    switch_to(parameter.tensor, parameter.sharded);
    if (plain_) {
      parameter.sharded.reset();
    }
  }
  whole_at_rest_.reset();
  if (writes == Writes::kKeep) {
    discard(); // copies that were kept whole are stale
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

int64_t FlatGroup::shard_bytes() const {
  int64_t bytes = plain_ ? 0 : static_cast<int64_t>(shard_storage_->nbytes());
  for (const auto& parameter : parameters_) {
    bytes += plain_ ? static_cast<int64_t>(parameter.tensor.nbytes()) : 0;
  }
  return bytes;
}

int64_t FlatGroup::gathered_bytes() const {
  int64_t bytes = 0;
  for (const auto* buffer : {&gathered_, &part_, &whole_at_rest_}) {
    bytes += buffer->defined() ? static_cast<int64_t>(buffer->nbytes()) : 0;
  }
  return bytes;
}

const std::string& FlatGroup::name_at(int64_t offset) const {
  for (const auto i : c10::irange(layout_.size())) {
    if (offset < layout_.interval(i).end) {
      return parameters_[i].name();
    }
  }
  return parameters_.back().name();
}

std::string FlatGroup::where() const {
  return "unit '" + settings_.unit_name + "', " +
      rank_text(settings_.rank, settings_.world_size);
}

} // namespace fsdp::detail
