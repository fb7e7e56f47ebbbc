#include "runtime/group_gradients.h"

#include "runtime/errors.h"
#include "runtime/flat_group.h"
#include "runtime/internal_guard.h"
#include "runtime/tensor_bytes.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace fsdp::detail {

namespace {

/// What a reduction sees: complex numbers travel as pairs of real ones.
at::Tensor as_real(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).reshape({-1}) : flat;
}

DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(
          false,
          "fsdp: gradients of dtype ",
          dtype,
          " cannot be reduced. Set ",
          "MixedPrecision::reduce_dtype to kFloat.");
  }
}

} // namespace

GroupGradients::GroupGradients(
    FlatGroup& group,
    std::shared_ptr<Communicator> reduce_communicator,
    double divide_factor)
    : group_(group),
      communicator_(std::move(reduce_communicator)),
      divide_factor_(divide_factor),
      present_(group.parameters().size()),
      arrivals_(group.parameters().size()) {
  refresh_active();
}

void GroupGradients::refresh_active() {
  std::vector<bool> active;
  for (const auto& parameter : group_.parameters()) {
    active.push_back(parameter.tensor.requires_grad());
  }
  if (active == active_) {
    return;
  }
  for (const auto i : c10::irange(active_.size())) {
    TORCH_CHECK_VALUE(
        !has_pending() || active[i] == active_[i],
        "fsdp: requires_grad of parameter '",
        group_.parameters()[i].name(),
        "' changed while gradients of unit '",
        group_.settings().unit_name,
        "' wait for a reduction (no_sync). Change it after a backward pass that"
        " synchronises.");
  }
  active_ = std::move(active);
  layout_.emplace(group_.layout(), active_);
  expected_.assign(active_.size(), 0);
  for (const auto i : c10::irange(active_.size())) {
    expected_[i] = active_[i] ? 1 : 0;
  }
  forget_arrivals();
}

void GroupGradients::forget_arrivals() {
  arrivals_.assign(active_.size(), 0);
  missing_ = 0;
  for (const auto count : expected_) {
    missing_ += count;
  }
}

at::Tensor GroupGradients::new_flat(int64_t numel, at::ScalarType dtype) const {
  const auto storage = allocate_storage(
      StorageKind::kGradient,
      group_.tag(),
      static_cast<size_t>(numel) * c10::elementSize(dtype),
      group_.device());
  return tensor_on(storage, dtype, {numel}, 0, Touched::kNo);
}

void GroupGradients::allocate_buffer() {
  buffer_ = new_flat(layout_->numel(), group_.reduce_dtype());
  in_buffer_.assign(active_.size(), false);
}

void GroupGradients::add(int64_t index, const at::Tensor& gradient) {
  const InternalGuard internal;
  const auto& parameter = group_.parameters()[index];
  const auto interval = layout_->interval(index);
  TORCH_CHECK_VALUE(
      gradient.numel() == group_.layout().interval(index).numel(),
      "fsdp: parameter '",
      parameter.name(),
      "' got a gradient of ",
      gradient.numel(),
      " elements, but has ",
      group_.layout().interval(index).numel(),
      ". Was a graph recorded over its shard, outside of a region?");
  if (!buffer_.defined()) {
    allocate_buffer();
  }
  const auto flat =
      (gradient.layout() == c10::kStrided ? gradient : gradient.to_dense())
          .reshape({-1});
  auto place = buffer_.narrow(0, interval.begin, interval.numel());
  if (in_buffer_[index]) {
    place.add_(flat);
  } else {
    place.copy_(flat);
  }
  in_buffer_[index] = true;
  present_[index] = true;
  graph_dropped_ = graph_dropped_ || gradient.requires_grad();
  if (++arrivals_[index] <= expected_[index]) {
    --missing_;
  }
}

void GroupGradients::zero_absent() {
  if (!buffer_.defined()) {
    allocate_buffer();
  }
  for (const auto i : c10::irange(group_.layout().size())) {
    const auto interval = layout_->interval(i);
    if (!in_buffer_[i] && !interval.empty()) {
      buffer_.narrow(0, interval.begin, interval.numel()).zero_();
    }
  }
}

void GroupGradients::start_reduction() {
  const InternalGuard internal;
  zero_absent();
  ++reductions_;
  Reduction reduction;
  reduction.input = std::move(buffer_);
  buffer_ = at::Tensor();
  const auto input = as_real(reduction.input);
  if (communicator_->size() == 1 || group_.replicated() || input.numel() == 0) {
    reduction.output = reduction.input; // in place
  }
  if (communicator_->size() == 1 || input.numel() == 0) {
    in_flight_.push_back(std::move(reduction));
    return;
  }
  const auto& unit = group_.settings().unit_name;
  const auto dtype = dtype_of(input.scalar_type());
  communicate([&] {
    if (group_.replicated()) {
      reduction.work = communicator_->all_reduce(
          bytes_of(input),
          dtype,
          ReduceOp::kSum,
          "all_reduce of unit '" + unit + "'");
      return;
    }
    auto cuts = layout_->cuts();
    const auto rank = static_cast<size_t>(communicator_->rank());
    reduction.output =
        new_flat(cuts[rank + 1] - cuts[rank], group_.reduce_dtype());
    for (auto& cut : cuts) {
      cut *= reduction.input.is_complex() ? 2 : 1;
    }
    reduction.work = communicator_->reduce_scatter(
        bytes_of(input),
        bytes_of(reduction.output),
        dtype,
        cuts,
        "reduce_scatter of unit '" + unit + "'");
  });
  in_flight_.push_back(std::move(reduction));
}

void GroupGradients::finish(Reduction& reduction) {
  if (reduction.work) {
    communicate([&] { reduction.work->wait(); });
  }
  const InternalGuard internal;
  reduction.work.reset();
  reduction.input.reset();
  if (divide_factor_ != 1.0) {
    reduction.output.div_(divide_factor_);
  }
  if (result_.defined()) {
    result_.add_(reduction.output);
  } else {
    result_ = std::move(reduction.output);
  }
}

void GroupGradients::finish_reductions() {
  for (auto& reduction : in_flight_) {
    finish(reduction);
  }
  in_flight_.clear();
}

void GroupGradients::finish_ready_reductions() {
  while (!in_flight_.empty() &&
         (!in_flight_.front().work || in_flight_.front().work->ready())) {
    finish(in_flight_.front());
    in_flight_.erase(in_flight_.begin());
  }
}

Interval GroupGradients::part_of(int64_t index) const {
  return group_.replicated() ? layout_->interval(index)
                             : layout_->owned_in_part(index, group_.position());
}

void GroupGradients::check_assignable() const {
  for (const auto i : c10::irange(group_.layout().size())) {
    const auto& parameter = group_.parameters()[i];
    const auto& grad = parameter.tensor.grad();
    const auto numel = part_of(i).numel();
    TORCH_CHECK_VALUE(
        !present_[i] || !grad.defined() || grad.numel() == numel,
        "fsdp: .grad of parameter '",
        parameter.name(),
        "' has ",
        grad.numel(),
        " elements, but this rank's shard has ",
        numel,
        ". Call zero_grad() before the backward pass.");
  }
}

void GroupGradients::add_to_grad(
    int64_t index,
    const at::Tensor& flat,
    Accumulate accumulate) {
  const auto& parameter = group_.parameters()[index];
  const auto part = part_of(index);
  const auto storage =
      c10::intrusive_ptr<UnitStorage>::reclaim_copy(unit_storage(flat));
  const auto shard = std::vector<int64_t>{part.numel()};
  const bool ordinary = group_.replicated() && !graph_dropped_;
  auto fresh = tensor_on(
      storage,
      group_.dtype(),
      group_.replicated() ? parameter.sizes : shard,
      part.begin,
      ordinary ? Touched::kNo : Touched::kYes);
  auto& grad = parameter.tensor.mutable_grad();
  if (grad.defined() && accumulate == Accumulate::kInPlace) {
    grad.add_(fresh.view_as(grad));
    return;
  }
  if (grad.defined()) {
    fresh.add_(grad.view_as(fresh));
  }
  grad = std::move(fresh);
}

std::vector<at::Tensor> GroupGradients::assign(Accumulate accumulate) {
  const InternalGuard internal;
  std::vector<at::Tensor> assigned;
  if (result_.defined()) {
    if (result_.scalar_type() != group_.dtype()) {
      auto flat = new_flat(result_.numel(), group_.dtype());
      flat.copy_(result_);
      result_ = std::move(flat);
    }
    unit_storage(result_)->graph_dropped = graph_dropped_;
    for (const auto i : c10::irange(group_.layout().size())) {
      if (present_[i]) {
        add_to_grad(i, result_, accumulate);
        assigned.push_back(group_.parameters()[i].tensor);
      }
    }
  }
  for (const auto i : c10::irange(active_.size())) {
    expected_[i] = active_[i] ? arrivals_[i] : 0;
  }
  drop();
  return assigned;
}

void GroupGradients::drop() {
  in_flight_.clear();
  buffer_.reset();
  result_.reset();
  present_.assign(active_.size(), false);
  reductions_ = 0;
  graph_dropped_ = false;
  forget_arrivals();
}

int64_t GroupGradients::unreduced_bytes() const {
  int64_t bytes =
      buffer_.defined() ? static_cast<int64_t>(buffer_.nbytes()) : 0;
  for (const auto& reduction : in_flight_) {
    bytes += reduction.input.defined()
        ? static_cast<int64_t>(reduction.input.nbytes())
        : 0;
  }
  return bytes;
}

} // namespace fsdp::detail
