#pragma once

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp::testing {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// Libtorch's optimizer for the plain run and ours for the sharded ones.
template <class Libtorch, class Ours, class N, class... A>
std::unique_ptr<torch::optim::Optimizer> optimizer_for(
    const N& /*net*/,
    A&&... arguments) {
  if constexpr (std::is_base_of_v<ShardedModule, N>) {
    return std::make_unique<Ours>(std::forward<A>(arguments)...);
  } else {
    return std::make_unique<Libtorch>(std::forward<A>(arguments)...);
  }
}

template <class N>
void train_step(N& net, Log& log, int step) {
  auto loss = net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
  loss.backward();
  log.loss(loss);
}

/// Four steps of both optimizers, over all parameters, log the same.
template <class Libtorch, class Ours, class Options>
void expect_same_steps(
    const Options& options,
    at::ScalarType type = torch::kDouble) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  settings.type = type;
  settings.tolerance = type == torch::kDouble ? 1e-11 : 1e-6;
  expect_same_program(
      make_network,
      [&](auto& net, Log& log) {
        const auto optimizer =
            optimizer_for<Libtorch, Ours>(net, net.parameters(), options);
        for (int step = 0; step < 4; ++step) {
          train_step(net, log, step);
          optimizer->step();
          optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
          log.parameters(net);
        }
      },
      settings);
}

/// Named tensors of these sizes, in one unit; values and gradients that are the
/// same on all ranks.
struct Tensors {
  explicit Tensors(
      std::vector<std::vector<int64_t>> sizes,
      at::ScalarType type = torch::kFloat);

  /// All of them in one unit.
  ShardedTensors::NamedUnits units() const;
  /// Its gradient of tensor i is gradients[i], exactly.
  at::Tensor loss() const;
  /// Makes gradients() the .grad of the tensors, unsharded.
  void assign_gradients() const;

  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
};

inline Tensors::Tensors(
    std::vector<std::vector<int64_t>> sizes,
    at::ScalarType type) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto seed = static_cast<double>(i);
    values.push_back(wave(sizes[i], 0.7 + seed).to(type).requires_grad_());
    gradients.push_back(wave(sizes[i], 1.3 + seed).to(type));
  }
}

inline ShardedTensors::NamedUnits one_unit_of(
    const std::vector<at::Tensor>& values) {
  ShardedTensors::NamedTensors named;
  for (size_t i = 0; i < values.size(); ++i) {
    named.emplace_back("t" + std::to_string(i), values[i]);
  }
  return {{"unit", std::move(named)}};
}

inline ShardedTensors::NamedUnits Tensors::units() const {
  return one_unit_of(values);
}

inline at::Tensor Tensors::loss() const {
  auto sum = torch::zeros({}, values.front().options());
  for (size_t i = 0; i < values.size(); ++i) {
    sum = sum + (values[i] * gradients[i]).sum();
  }
  return sum;
}

inline void Tensors::assign_gradients() const {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i].mutable_grad() = gradients[i].clone();
  }
}

} // namespace fsdp::testing
