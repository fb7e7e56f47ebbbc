#pragma once

#include "harness/parity.h"

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

using NamedTensors = ShardedTensors::NamedTensors;
using NamedModules =
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

/// Each module is a unit; parameters are named "module.parameter".
NamedUnits unit_per_module(const NamedModules& modules);

/// Each parameter is a unit: the hardest grouping, since most operators then
/// read several units.
NamedUnits unit_per_parameter(const NamedModules& modules);
NamedUnits unit_per_tensor(const NamedTensors& tensors);

/// All of `tensors` form one unit.
NamedUnits one_unit(const NamedTensors& tensors);

TestModel model_of(
    NamedUnits units,
    std::function<at::Tensor(const at::Tensor& rows)> loss);

/// A normally distributed tensor that requires a gradient.
at::Tensor random_parameter(at::IntArrayRef sizes, double scale = 1.0);

/// `tensor` in the type of `weight`: what models do that must run in any type.
inline at::Tensor cast_like(
    const at::Tensor& tensor,
    const at::Tensor& weight) {
  return tensor.to(weight.scalar_type());
}

/// Settings for losses that are no mean over rows: every rank takes all rows.
inline ParitySettings same_batch() {
  ParitySettings settings;
  settings.batch = Batch::kSame;
  return settings;
}

} // namespace fsdp::testing
