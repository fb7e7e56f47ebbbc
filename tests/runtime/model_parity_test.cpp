// Training with shards equals training without, model by model.

#include "harness/parity.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using at::Tensor;

ShardedTensors::NamedTensors named(
    const std::string& prefix,
    const nn::Module& module) {
  ShardedTensors::NamedTensors tensors;
  for (const auto& parameter : module.named_parameters()) {
    tensors.emplace_back(prefix + "." + parameter.key(), parameter.value());
  }
  return tensors;
}

/// Four linear layers, one unit each; 15 wide, so that no shard is even.
struct Layers {
  std::vector<nn::Linear> layers;
  Tensor x = torch::randn({kRows, 15});

  Layers() {
    for (int i = 0; i < 4; ++i) {
      layers.emplace_back(15, 15);
    }
  }

  NamedUnits units() const {
    NamedUnits result;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto name = "layer" + std::to_string(i);
      result.emplace_back(name, named(name, *layers[i]));
    }
    return result;
  }

  Tensor forward(Tensor y) {
    for (auto& layer : layers) {
      y = torch::tanh(layer->forward(y));
    }
    return y;
  }
};

template <class F>
MakeModel layers_with(F loss) {
  return [loss] {
    const auto owner = std::make_shared<Layers>();
    return TestModel{
        owner->units(),
        [owner, loss](const Tensor& rows) { return loss(*owner, rows); },
        owner};
  };
}

TEST(ModelParity, Mlp) {
  expect_same_training(layers_with([](Layers& m, const Tensor& rows) {
    return m.forward(m.x.index_select(0, rows)).pow(2).mean();
  }));
}

TEST(ModelParity, LayersUsedTwice) {
  expect_same_training(layers_with([](Layers& m, const Tensor& rows) {
    return m.forward(m.forward(m.x.index_select(0, rows))).pow(2).mean();
  }));
}

} // namespace
} // namespace fsdp::testing
