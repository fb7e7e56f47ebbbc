// Training with shards equals training without, model by model.

#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace models {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

constexpr int64_t kWidth = 15; // so that no shard is even

/// Four linear layers, one unit each.
struct Layers {
  std::vector<nn::Linear> layers;
  Tensor x = torch::randn({kRows, kWidth});

  Layers() {
    for (int i = 0; i < 4; ++i) {
      layers.emplace_back(kWidth, kWidth);
    }
  }
  NamedUnits units() const {
    NamedModules modules;
    for (const auto& layer : layers) {
      modules.emplace_back(
          "layer" + std::to_string(modules.size()), layer.ptr());
    }
    return unit_per_module(modules);
  }
  Tensor input(const Tensor& rows) const {
    return cast_like(x.index_select(0, rows), layers.front()->weight);
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
    const auto model = std::make_shared<Layers>();
    return model_of(model->units(), [model, loss](const Tensor& rows) {
      return loss(*model, rows);
    });
  };
}

MakeModel mlp() {
  return layers_with([](Layers& model, const Tensor& rows) {
    return model.forward(model.input(rows)).pow(2).mean();
  });
}

/// For twenty steps one strategy is enough: all have the same bits.
ParitySettings twenty_steps(ParitySettings settings = {}) {
  settings.steps = 20;
  settings.strategies = {Strategy::kFullShard};
  return settings;
}

/// AdamW makes steps of the rounding noise of gradients that are zero by
/// symmetry (a key bias shifts all scores of a query alike). So: SGD with parts
/// of the batch, and AdamW where the mean over ranks is exact, with the same
/// batch on a power of two of ranks.
void expect_same_training_of_attention(
    const MakeModel& make,
    ParitySettings settings = {}) {
  settings.optimizer = Optimizer::kSgd;
  settings.learning_rate = 0.1;
  expect_same_training(make, settings);
  settings.optimizer = Optimizer::kAdamW;
  settings.learning_rate = 1e-2;
  settings.batch = Batch::kSame;
  settings.world_sizes = {1, 2, 4};
  expect_same_training(make, settings);
}

TEST(ModelParity, Mlp) {
  expect_same_training_in_both_types(mlp());
}

TEST(ModelParity, MlpForTwentySteps) {
  expect_same_training_in_both_types(mlp(), twenty_steps());
}

TEST(ModelParity, MlpWithSgdAndMomentum) {
  ParitySettings settings;
  settings.optimizer = Optimizer::kSgd;
  settings.learning_rate = 0.1;
  expect_same_training_in_both_types(mlp(), settings);
}

TEST(ModelParity, LayersUsedTwice) {
  expect_same_training_in_both_types(
      layers_with([](Layers& model, const Tensor& rows) {
        const auto once = model.forward(model.input(rows));
        return model.forward(once).pow(2).mean();
      }));
}

TEST(ModelParity, TwoBackwardPassesOverARetainedGraph) {
  expect_same_training(layers_with([](Layers& model, const Tensor& rows) {
    const auto y = model.forward(model.input(rows));
    y.pow(2).mean().backward({}, /*retain_graph=*/true);
    return y.abs().mean();
  }));
}

/// Activation checkpointing: forward keeps nothing but the input of the block,
/// backward runs the block again.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Block = std::function<Tensor(const Tensor&)>;

  static Tensor
  forward(AutogradContext* context, const Tensor& x, const Block* block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    return (*block)(x);
  }
  static tensor_list backward(
      AutogradContext* context,
      const tensor_list& gradients) {
    const auto* block =
        reinterpret_cast<const Block*>(context->saved_data["block"].toInt());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode grad_mode(true);
    torch::autograd::backward({(*block)(x)}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};

TEST(ModelParity, RecomputationInBackward) {
  const auto make = [] {
    const auto model = std::make_shared<Layers>();
    const auto blocks = std::make_shared<std::vector<Recomputed::Block>>();
    for (auto& layer : model->layers) {
      blocks->push_back([layer = layer.get()](const Tensor& x) {
        return torch::tanh(layer->forward(x));
      });
    }
    return model_of(model->units(), [model, blocks](const Tensor& rows) {
      auto y = model->input(rows).requires_grad_();
      for (const auto& block : *blocks) {
        y = Recomputed::apply(y, &block);
      }
      return y.pow(2).mean();
    });
  };
  expect_same_training_in_both_types(make);
}

TEST(ModelParity, ViewsOfOutputsEditedInPlace) {
  expect_same_training_in_both_types(
      layers_with([](Layers& model, const Tensor& rows) {
        auto y = model.input(rows);
        for (auto& layer : model.layers) {
          y = layer->forward(y).view({-1, 3, 5}).view({-1, kWidth});
          y += 1;
          y.narrow(1, 0, 4).mul_(0.5);
          y = torch::tanh(y);
        }
        return y.pow(2).mean();
      }));
}

TEST(ModelParity, GradientPenalty) {
  expect_same_training_in_both_types(
      layers_with([](Layers& model, const Tensor& rows) {
        const auto x = model.input(rows).requires_grad_();
        const auto y = model.forward(x);
        const auto gradient = torch::autograd::grad(
            {y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
        return gradient[0].pow(2).mean() + y.mean();
      }));
}

TEST(ModelParity, WeightReadOutsideOfItsModule) {
  expect_same_training_in_both_types(
      layers_with([](Layers& model, const Tensor& rows) {
        const auto y = model.forward(model.input(rows));
        const auto& other = model.layers[1]->weight;
        return torch::matmul(y, model.layers[0]->weight.t()).pow(2).mean() +
            other.size(0) * other.norm();
      }));
}

TEST(ModelParity, CatAndStackOfWeightsOfSeveralUnits) {
  expect_same_training_in_both_types(layers_with([](Layers& model,
                                                    const Tensor& rows) {
    const auto& layers = model.layers;
    const auto weight =
        torch::cat({layers[0]->weight, layers[1]->weight, layers[2]->weight});
    const auto biases = torch::stack({layers[3]->bias, layers[2]->bias});
    return torch::matmul(model.input(rows), weight.t()).pow(2).mean() +
        biases.sum();
  }));
}

MakeModel lstm() {
  return [] {
    nn::LSTM recurrent(nn::LSTMOptions(7, 9).num_layers(2));
    nn::Linear head(9, 5);
    const auto x = torch::randn({5, kRows, 7});
    return model_of(
        unit_per_module({{"recurrent", recurrent.ptr()}, {"head", head.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto input = cast_like(x.index_select(1, rows), head->weight);
          return head(std::get<0>(recurrent(input))).pow(2).mean();
        });
  };
}

TEST(ModelParity, Lstm) {
  expect_same_training_in_both_types(lstm());
}

TEST(ModelParity, LstmForTwentySteps) {
  expect_same_training(lstm(), twenty_steps());
}

TEST(ModelParity, MultiheadAttention) {
  const auto make = [] {
    nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(10, 2));
    nn::LayerNorm norm(nn::LayerNormOptions({10}));
    const auto x = torch::randn({5, kRows, 10});
    return model_of(
        unit_per_module({{"attention", attention.ptr()}, {"norm", norm.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto y = norm(cast_like(x.index_select(1, rows), norm->weight));
          return std::get<0>(attention(y, y, y)).pow(2).mean();
        });
  };
  expect_same_training_of_attention(make);
  expect_same_training_in_bfloat16(make);
}

MakeModel transformer_encoder() {
  return [] {
    nn::TransformerEncoder encoder(nn::TransformerEncoderOptions(
        nn::TransformerEncoderLayerOptions(10, 2).dim_feedforward(18).dropout(
            0.0),
        3));
    NamedModules layers;
    for (const auto& layer : *encoder->layers) {
      layers.emplace_back("layer" + std::to_string(layers.size()), layer);
    }
    const auto x = torch::randn({5, kRows, 10});
    const auto target = torch::randn({5, kRows, 10});
    return model_of(unit_per_module(layers), [=](const Tensor& rows) mutable {
      const auto weight = encoder->parameters().front();
      const auto y = encoder(cast_like(x.index_select(1, rows), weight));
      return torch::mse_loss(
          y, cast_like(target.index_select(1, rows), weight));
    });
  };
}

TEST(ModelParity, TransformerEncoder) {
  expect_same_training_of_attention(transformer_encoder());
  expect_same_training_in_bfloat16(transformer_encoder());
}

TEST(ModelParity, TransformerEncoderForTwentySteps) {
  expect_same_training_of_attention(transformer_encoder(), twenty_steps());
}

/// An embedding tied to the output, and a convolution with batch normalisation
/// (which is why all ranks must take the same batch).
MakeModel tied_embedding_and_convolution() {
  return [] {
    nn::Embedding embedding(11, 9);
    nn::Conv2d convolution(nn::Conv2dOptions(3, 4, 3).bias(false));
    nn::BatchNorm2d norm(4);
    const auto words = torch::randint(0, 11, {kRows});
    const auto images = torch::randn({kRows, 3, 6, 6});
    return model_of(
        unit_per_module(
            {{"embedding", embedding.ptr()},
             {"convolution", convolution.ptr()},
             {"norm", norm.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto some = words.index_select(0, rows);
          const auto scores =
              torch::matmul(embedding(some), embedding->weight.t());
          const auto y = norm(convolution(images.index_select(0, rows)));
          return torch::nll_loss(torch::log_softmax(scores, 1), some) +
              torch::gelu(y).mean();
        });
  };
}

TEST(ModelParity, TiedEmbeddingConvolutionAndBatchNorm) {
  expect_same_training(tied_embedding_and_convolution(), same_batch());
}

TEST(ModelParity, TiedEmbeddingConvolutionAndBatchNormForTwentySteps) {
  expect_same_training(
      tied_embedding_and_convolution(), twenty_steps(same_batch()));
}

TEST(ModelParity, TorchScriptFunction) {
  ParitySettings settings;
  settings.steps = 6; // the first calls are profiled, later ones optimised
  const auto make = [] {
    const auto script = torch::jit::compile(R"(
def dense(x, w, b):
    return torch.tanh(torch.matmul(x, w.t()) + b)
)");
    const auto w = random_parameter({17, 15});
    const auto b = torch::zeros({17}).requires_grad_();
    const auto x = torch::randn({kRows, 15});
    return model_of(
        unit_per_tensor({{"w", w}, {"b", b}}), [=](const Tensor& rows) {
          const auto input = cast_like(x.index_select(0, rows), w);
          return script->run_method("dense", input, w, b)
              .toTensor()
              .pow(2)
              .mean();
        });
  };
  expect_same_training_in_both_types(make, settings);
}

} // namespace
} // namespace models
} // namespace fsdp::testing
