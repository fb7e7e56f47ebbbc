#pragma once

#include "harness/program.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// Four linear layers with tanh, one unit each; 15 wide, so that no shard is
/// even.
struct TanhLayers {
  static constexpr int64_t kWidth = 15;

  std::vector<torch::nn::Linear> layers;
  at::Tensor x = torch::randn({kRows, kWidth});

  TanhLayers() {
    for (int i = 0; i < 4; ++i) {
      layers.emplace_back(kWidth, kWidth);
    }
  }

  NamedUnits units() const {
    NamedUnits result;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto name = "layer" + std::to_string(i);
      result.push_back(
          {name,
           {{name + ".weight", layers[i]->weight},
            {name + ".bias", layers[i]->bias}}});
    }
    return result;
  }

  at::Tensor input(const at::Tensor& rows) const {
    return x.index_select(0, rows);
  }

  at::Tensor forward(at::Tensor y) {
    for (auto& layer : layers) {
      y = torch::tanh(layer->forward(y));
    }
    return y;
  }

  at::Tensor loss(const at::Tensor& rows) {
    return forward(input(rows)).pow(2).mean();
  }

  at::Tensor& weight(size_t layer) { return layers.at(layer)->weight; }
};

/// A model with the values that every rank gets.
template <class Model = TanhLayers>
std::shared_ptr<Model> build_model() {
  std::shared_ptr<Model> model;
  build([&] {
    model = std::make_shared<Model>();
    return TestModel{};
  });
  return model;
}

/// A model of which tests train `loss(model, rows)`.
template <class Model = TanhLayers, class F>
MakeModel model_with(F loss) {
  return [loss] {
    const auto owner = std::make_shared<Model>();
    return TestModel{
        owner->units(),
        [owner, loss](const at::Tensor& rows) { return loss(*owner, rows); },
        owner};
  };
}

/// A program over a model: `body(model, run)`.
template <class Model = TanhLayers, class F>
MakeProgram program_with(F body) {
  return [body] {
    const auto owner = std::make_shared<Model>();
    return TestProgram{
        owner->units(),
        [owner, body](Trial& run) { body(*owner, run); },
        owner};
  };
}

} // namespace fsdp::testing
