#pragma once

#include <torch/torch.h>

namespace fsdp::testing {

/// The feed-forward half of a transformer block.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 2 * width + 1))),
        down(register_module("down", torch::nn::Linear(2 * width + 1, width))) {
  }

  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::tanh(up(norm(x))));
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// (n, 3) to (n, 2), through blocks of an odd width.
struct NetworkImpl : torch::nn::Module {
  explicit NetworkImpl(int64_t depth = 2, int64_t width = 5)
      : input(register_module("input", torch::nn::Linear(3, width))),
        layers(register_module("layers", torch::nn::ModuleList())),
        norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        head(register_module("head", torch::nn::Linear(width, 2))) {
    for (int64_t i = 0; i < depth; ++i) {
      layers->push_back(Block(width));
    }
  }

  at::Tensor features(const at::Tensor& x) {
    auto y = input(x);
    for (const auto& layer : *layers) {
      y = layer->as<BlockImpl>()->forward(y);
    }
    return norm(y);
  }

  at::Tensor forward(const at::Tensor& x) { return head(features(x)); }

  torch::nn::Linear input;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Network);

inline std::shared_ptr<NetworkImpl> make_network() {
  return std::make_shared<NetworkImpl>();
}

} // namespace fsdp::testing
