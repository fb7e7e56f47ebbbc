#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/net.h"

#include <fsdp/sharded_module.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace fsdp {

namespace {

/// Sum of |x|^p over tensors, or their largest |x| for infinity.
class NormSum {
 public:
  explicit NormSum(double norm_type) : norm_type_(norm_type) {}

  void add(const at::Tensor& gradient) {
    if (gradient.numel() == 0) {
      return;
    }
    const auto real =
        gradient.is_complex() ? gradient.abs() : gradient.detach();
    const auto dtype =
        real.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const double norm =
        at::linalg_vector_norm(real, norm_type_, std::nullopt, false, dtype)
            .item<double>();
    if (std::isinf(norm_type_)) {
      // Not std::max, which would drop a NaN.
      sum_ = (norm > sum_ || std::isnan(norm)) ? norm : sum_;
    } else {
      sum_ += std::pow(norm, norm_type_);
    }
  }

  double& sum() { return sum_; }

 private:
  double norm_type_;
  double sum_ = 0.0;
};

} // namespace

double ShardedModule::clip_grad_norm_(
    double max_norm,
    double norm_type,
    bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(
      norm_type > 0.0,
      "fsdp: clip_grad_norm_: norm_type must be positive or infinity, but got ",
      norm_type,
      ".");
  const detail::InternalGuard internal;
  NormSum sharded(norm_type);    // parts: joined over the ranks
  NormSum replicated(norm_type); // the same on all ranks: counted once
  for (const auto& unit : net()->units()) {
    for (const auto& group : unit->groups) {
      for (const auto& parameter : group->parameters()) {
        if (parameter.tensor.grad().defined() && group->is_first_replica()) {
          (group->replicated() ? replicated : sharded)
              .add(parameter.tensor.grad());
        }
      }
    }
  }
  for (const auto& [name, tensor] : ignored_) {
    if (tensor.grad().defined()) {
      replicated.add(tensor.grad());
    }
  }
  auto& total = sharded.sum();
  detail::communicate([&] {
    net()
        ->communicator()
        .all_reduce(
            {reinterpret_cast<std::byte*>(&total), sizeof(total)},
            DType::kFloat64,
            std::isinf(norm_type) ? ReduceOp::kMax : ReduceOp::kSum,
            "clip_grad_norm_")
        ->wait();
  });
  const double other = replicated.sum();
  const double norm = std::isinf(norm_type)
      ? (std::isnan(other) || other > total ? other : total)
      : std::pow(total + other, 1.0 / norm_type);
  TORCH_CHECK(
      !error_if_nonfinite || std::isfinite(norm),
      "fsdp: clip_grad_norm_: the norm of the gradients is ",
      norm,
      ".");
  const double factor = std::min(max_norm / (norm + 1e-6), 1.0);
  if (factor < 1.0 || std::isnan(factor)) {
    for (const auto& tensor : parameters()) {
      if (tensor.grad().defined()) {
        tensor.mutable_grad().mul_(factor);
      }
    }
  }
  return norm;
}

void ShardedModule::clip_grad_value_(double clip_value) {
  TORCH_CHECK_VALUE(
      clip_value >= 0.0,
      "fsdp: clip_grad_value_: clip_value must not be negative, but got ",
      clip_value,
      ".");
  const detail::InternalGuard internal;
  for (const auto& tensor : parameters()) {
    if (tensor.grad().defined()) {
      tensor.mutable_grad().clamp_(-clip_value, clip_value);
    }
  }
}

} // namespace fsdp
