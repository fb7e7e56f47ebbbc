#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/net.h"

#include <fsdp/sharded_module.h>

#include <ATen/ATen.h>

namespace fsdp {

double ShardedModule::mean_over_ranks(double value) const {
  detail::communicate([&] {
    net()
        ->communicator()
        .all_reduce(
            {reinterpret_cast<std::byte*>(&value), sizeof(value)},
            DType::kFloat64,
            ReduceOp::kMean,
            "mean_over_ranks")
        ->wait();
  });
  return value;
}

double ShardedModule::mean_over_ranks(const at::Tensor& value) const {
  TORCH_CHECK_VALUE(
      value.defined() && value.numel() == 1 && !value.is_complex(),
      "fsdp: mean_over_ranks: expected a real tensor of one element, but got ",
      value.defined() ? value.toString() : "an undefined tensor",
      value.defined() ? c10::str(" of shape ", value.sizes()) : "",
      ". Pass loss.mean(), say.");
  const detail::InternalGuard internal;
  return mean_over_ranks(value.item<double>());
}

} // namespace fsdp
