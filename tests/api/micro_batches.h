#pragma once

#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>

namespace fsdp::testing {

inline std::shared_ptr<torch::nn::LinearImpl> make_linear() {
  return std::make_shared<torch::nn::LinearImpl>(5, 3);
}

/// A loss whose gradient is `value` for every element of every parameter.
inline at::Tensor constant_loss(torch::nn::LinearImpl& linear, double value) {
  return value * (linear.weight.sum() + linear.bias.sum());
}

inline void expect_gradients(ShardedModule& net, std::optional<double> value) {
  for (const auto& [name, gradient] : whole_gradients(net)) {
    ASSERT_EQ(gradient.defined(), value.has_value()) << name;
    if (value.has_value()) {
      EXPECT_TRUE(
          all_close(gradient, torch::full_like(gradient, *value), 1e-6, 0))
          << name << gradient;
    }
  }
}

/// 's': a micro-batch that synchronises, 'n': one that does not. Micro-batch i
/// has the gradient 2^i on rank 0, twice that on rank 1, and so on.
inline void expect_micro_batches_add_up(
    const std::string& sequence,
    const World& world,
    const Options& options) {
  FullyShardedDataParallel net(seeded(make_linear), world, options);
  double sum = 0;
  std::optional<double> visible;
  for (size_t i = 0; i < sequence.size(); ++i) {
    std::optional<NoSync> no_sync;
    if (sequence[i] == 'n') {
      no_sync.emplace(net.no_sync());
    }
    const double value = 1 << i;
    net.call(constant_loss, value * (world.rank() + 1)).backward();
    sum += value * (world.size() + 1) / 2; // the mean over ranks
    if (sequence[i] == 's') {
      visible = sum;
    }
    expect_gradients(net, visible);
  }
}

} // namespace fsdp::testing
