#include "harness/grouping.h"

namespace fsdp::testing {

NamedUnits unit_per_module(const NamedModules& modules) {
  NamedUnits units;
  for (const auto& [name, module] : modules) {
    NamedTensors tensors;
    for (const auto& parameter : module->named_parameters()) {
      tensors.emplace_back(name + "." + parameter.key(), parameter.value());
    }
    units.emplace_back(name, std::move(tensors));
  }
  return units;
}

NamedUnits unit_per_parameter(const NamedModules& modules) {
  NamedUnits units;
  for (const auto& [module, tensors] : unit_per_module(modules)) {
    for (auto& unit : unit_per_tensor(tensors)) {
      units.push_back(std::move(unit));
    }
  }
  return units;
}

NamedUnits unit_per_tensor(const NamedTensors& tensors) {
  NamedUnits units;
  for (const auto& tensor : tensors) {
    units.emplace_back("unit of " + tensor.first, NamedTensors{tensor});
  }
  return units;
}

NamedUnits one_unit(const NamedTensors& tensors) {
  return {{"unit", tensors}};
}

TestModel model_of(
    NamedUnits units,
    std::function<at::Tensor(const at::Tensor& rows)> loss) {
  return {std::move(units), std::move(loss), nullptr};
}

at::Tensor random_parameter(at::IntArrayRef sizes, double scale) {
  return (torch::randn(sizes) * scale).requires_grad_();
}

} // namespace fsdp::testing
