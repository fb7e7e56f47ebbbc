#include "runtime/group_gradients.h"

#include "runtime/errors.h"
#include "runtime/flat_group.h"
#include "runtime/internal_guard.h"
#include "runtime/mesh.h"
#include "runtime/tensor_bytes.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <utility>

namespace fsdp::detail {

namespace {

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

/// What a reduction sees, and how many of it make an element: complex numbers
/// travel as pairs of real ones.
std::pair<DType, int64_t> reals_of(at::ScalarType dtype) {
  return c10::isComplexType(dtype)
      ? std::make_pair(dtype_of(c10::toRealValueType(dtype)), int64_t{2})
      : std::make_pair(dtype_of(dtype), int64_t{1});
}

} // namespace

GroupGradients::GroupGradients(FlatGroup& group, double divide_factor)
    : group_(group),
      ranks_(group.settings().world_size),
      divide_factor_(divide_factor),
      op_(divide_factor == ranks_ ? ReduceOp::kMean : ReduceOp::kSum),
      arrived_(group.parameters().size()),
      present_(group.parameters().size()),
      arrivals_(group.parameters().size()),
      local_results_(group.parameters().size()) {
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

void GroupGradients::add(int64_t index, const at::Tensor& gradient) {
  const InternalGuard internal;
  const auto& parameter = group_.parameters()[index];
  TORCH_CHECK_VALUE(
      gradient.numel() == layout_->interval(index).numel(),
      "fsdp: parameter '",
      parameter.name(),
      "' got a gradient of ",
      gradient.numel(),
      " elements, but ",
      active_[index] ? "has " : "did not require one when the region opened: ",
      layout_->interval(index).numel(),
      ". Was a graph recorded over its shard, outside of a region?");
  const auto dense =
      gradient.layout() == c10::kStrided ? gradient : gradient.to_dense();
  auto flat = flattened(dense.contiguous().to(group_.reduce_dtype()));
  auto& arrived = arrived_[index];
  if (arrived.defined()) {
    // Gradients of several parameters may be views of one tensor.
    arrived = arrived.storage().use_count() == 1 ? arrived.add_(flat)
                                                 : arrived.add(flat);
  } else {
    arrived = std::move(flat);
  }
  pending_ = true;
  present_[index] = true;
  graph_dropped_ = graph_dropped_ || gradient.requires_grad();
  if (++arrivals_[index] <= expected_[index]) {
    --missing_;
  }
}

std::vector<Piece> GroupGradients::pieces_of(
    const std::vector<at::Tensor>& inputs) const {
  std::vector<Piece> pieces;
  const auto element =
      static_cast<int64_t>(c10::elementSize(group_.reduce_dtype()));
  for (const auto i : c10::irange(group_.layout().size())) {
    if (inputs[i].defined() && inputs[i].numel() > 0) {
      pieces.push_back(
          {layout_->interval(i).begin * element, bytes_of(inputs[i])});
    }
  }
  return pieces;
}

void GroupGradients::start_reduction() {
  const InternalGuard internal;
  ++reductions_;
  Reduction reduction;
  reduction.inputs = std::exchange(
      arrived_, std::vector<at::Tensor>(group_.parameters().size()));
  pending_ = false;
  if (!is_local() && layout_->numel() > 0) {
    reduction.work = reduce(reduction);
  } else if (!is_local()) { // of parameters without elements
    reduction.output = new_flat(0, group_.reduce_dtype());
  }
  in_flight_.push_back(std::move(reduction));
}

std::unique_ptr<Work> GroupGradients::reduce(Reduction& reduction) const {
  const auto& mesh = group_.mesh();
  const auto& unit = group_.settings().unit_name;
  const auto [dtype, reals] = reals_of(group_.reduce_dtype());
  auto pieces = pieces_of(reduction.inputs);
  if (group_.layout().world_size() == 1) { // every rank of a group holds it all
    const auto& communicator = mesh.shards == 1 ? mesh.replicas : mesh.reduce;
    reduction.output = new_flat(layout_->numel(), group_.reduce_dtype());
    return communicate([&] {
      return communicator->all_reduce_pieces(
          std::move(pieces),
          bytes_of(reduction.output),
          dtype,
          op_,
          "all_reduce of unit '" + unit + "'");
    });
  }
  auto cuts = layout_->cuts();
  const auto position = static_cast<size_t>(group_.position());
  reduction.output =
      new_flat(cuts[position + 1] - cuts[position], group_.reduce_dtype());
  for (auto& cut : cuts) {
    cut *= reals;
  }
  return communicate([&] {
    return mesh.reduce->reduce_scatter_pieces(
        std::move(pieces),
        bytes_of(reduction.output),
        dtype,
        cuts,
        "reduce_scatter of unit '" + unit + "'",
        op_);
  });
}

std::unique_ptr<Work> GroupGradients::average(const at::Tensor& part) const {
  return communicate([&] {
    return group_.mesh().replicas->all_reduce(
        bytes_of(part),
        reals_of(group_.reduce_dtype()).first,
        op_,
        "average of unit '" + group_.settings().unit_name + "' over replicas");
  });
}

at::Tensor GroupGradients::divided(at::Tensor gradient) const {
  if (divide_factor_ == 1.0) {
    return gradient;
  }
  // The program may have kept a view of what it computed.
  return gradient.storage().use_count() == 1 ? gradient.div_(divide_factor_)
                                             : gradient.div(divide_factor_);
}

void GroupGradients::keep_local(std::vector<at::Tensor> inputs) {
  const InternalGuard internal;
  for (const auto i : c10::irange(inputs.size())) {
    auto& result = local_results_[i];
    if (!inputs[i].defined()) {
      continue;
    }
    result = result.defined() ? result.add(inputs[i]) : std::move(inputs[i]);
  }
}

void GroupGradients::keep(at::Tensor output) {
  const InternalGuard internal;
  if (op_ == ReduceOp::kSum && divide_factor_ != 1.0) {
    output.div_(divide_factor_);
  }
  if (result_.defined()) {
    result_.add_(output);
  } else {
    result_ = std::move(output);
  }
}

bool GroupGradients::is_ready() {
  const auto& work = in_flight_.front().work;
  return work == nullptr || work->ready();
}

void GroupGradients::finish_reduction() {
  auto reduction = std::move(in_flight_.front());
  in_flight_.pop_front();
  if (reduction.work) {
    communicate([&] { reduction.work->wait(); });
    reduction.work.reset();
  }
  if (is_local()) {
    keep_local(std::move(reduction.inputs));
    return;
  }
  reduction.inputs.clear();
  if (group_.mesh().replicas != nullptr && group_.layout().world_size() > 1 &&
      reduction.output.numel() > 0) {
    reduction.work = average(reduction.output);
    averaging_.push_back(std::move(reduction));
    return;
  }
  keep(std::move(reduction.output));
}

void GroupGradients::finish_averages() {
  for (auto& each : averaging_) {
    communicate([&] { each.work->wait(); });
    each.work.reset();
    keep(std::move(each.output));
  }
  averaging_.clear();
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

at::Tensor GroupGradients::gradient_of(int64_t index) const {
  const auto& local = local_results_[index];
  const auto storage = is_local()
      ? storage_around(StorageKind::kGradient, group_.tag(), local)
      : c10::intrusive_ptr<UnitStorage>::reclaim_copy(unit_storage(result_));
  storage->graph_dropped = graph_dropped_;
  const bool ordinary = group_.replicated() && !graph_dropped_;
  return tensor_on(
      storage,
      group_.dtype(),
      group_.sizes_at_rest(index),
      is_local() ? 0 : part_of(index).begin,
      ordinary ? Touched::kNo : Touched::kYes);
}

void GroupGradients::add_to_grad(
    int64_t index,
    at::Tensor gradient,
    Accumulate accumulate) const {
  auto& grad = group_.parameters()[index].tensor.mutable_grad();
  if (grad.defined() && accumulate == Accumulate::kInPlace) {
    grad.add_(gradient.view_as(grad));
    return;
  }
  if (grad.defined()) {
    gradient.add_(grad.view_as(gradient));
  }
  grad = std::move(gradient);
}

std::vector<at::Tensor> GroupGradients::assign(Accumulate accumulate) {
  const InternalGuard internal;
  std::vector<at::Tensor> assigned;
  if (result_.defined() && result_.scalar_type() != group_.dtype()) {
    auto flat = new_flat(result_.numel(), group_.dtype());
    flat.copy_(result_);
    result_ = std::move(flat);
  }
  for (const auto i : c10::irange(group_.layout().size())) {
    auto& local = local_results_[i];
    if (local.defined()) {
      local = divided(std::move(local)).to(group_.dtype());
      local = local.storage().use_count() == 1 ? local : local.clone();
    }
    if (present_[i] && (result_.defined() || local.defined())) {
      add_to_grad(i, gradient_of(i), accumulate);
      assigned.push_back(group_.parameters()[i].tensor);
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
  averaging_.clear();
  arrived_.assign(active_.size(), at::Tensor());
  pending_ = false;
  result_.reset();
  local_results_.assign(active_.size(), at::Tensor());
  present_.assign(active_.size(), false);
  reductions_ = 0;
  graph_dropped_ = false;
  forget_arrivals();
}

int64_t GroupGradients::unreduced_bytes() const {
  int64_t bytes = 0;
  const auto add_all = [&](const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      bytes += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
  };
  add_all(arrived_);
  add_all(local_results_);
  add_all({result_});
  for (const auto& reduction : in_flight_) {
    add_all(reduction.inputs);
    add_all({reduction.output});
  }
  for (const auto& reduction : averaging_) {
    add_all({reduction.output});
  }
  return bytes;
}

} // namespace fsdp::detail
