// Under mixed precision, model code that casts nothing computes what code
// computes that casts the inputs of its weights by hand.

#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace input_casts {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

/// Gives inputs to a model: as they are, or in the type of its weights.
using Feed = std::function<Tensor(const Tensor& input, const Tensor& weight)>;

/// `make_model(feed)` makes a model that takes its inputs from `feed`.
void expect_no_casts_needed(
    const std::function<TestModel(const Feed& feed)>& make_model) {
  const auto as_it_is = [](const Tensor& input, const Tensor&) {
    return input;
  };
  expect_same_training_in_bfloat16_as(
      [&] { return make_model(cast_like); },
      [&] { return make_model(as_it_is); });
}

TEST(InputCasts, LinearAndConvolution) {
  expect_no_casts_needed([](const Feed& feed) {
    nn::Conv2d convolution(3, 5, 3);
    nn::Linear linear(80, 9);
    const auto images = torch::randn({kRows, 3, 6, 6});
    return model_of(
        unit_per_parameter(
            {{"convolution", convolution.ptr()}, {"linear", linear.ptr()}}),
        [=](const Tensor&) mutable {
          const auto y = convolution(feed(images, convolution->weight));
          // A part that knows of no bfloat16: what follows casts again.
          const auto z = y.to(at::kFloat).softmax(1).flatten(1);
          return linear(feed(z, linear->weight)).pow(2).mean();
        });
  });
}

TEST(InputCasts, RecurrentNetworkAndItsInitialState) { // a list of inputs
  expect_no_casts_needed([](const Feed& feed) {
    nn::LSTM recurrent(nn::LSTMOptions(7, 9).num_layers(2));
    nn::GRUCell cell(9, 7);
    const auto x = torch::randn({5, kRows, 7});
    const auto h = torch::randn({2, kRows, 9});
    const auto c = torch::randn({2, kRows, 9});
    return model_of(
        unit_per_parameter(
            {{"recurrent", recurrent.ptr()}, {"cell", cell.ptr()}}),
        [=](const Tensor&) mutable {
          const auto weight = recurrent->parameters().front();
          const auto state = std::make_tuple(feed(h, weight), feed(c, weight));
          const auto outputs = std::get<0>(recurrent(feed(x, weight), state));
          return cell(outputs.select(0, 4), feed(x[0], weight)).pow(2).mean();
        });
  });
}

TEST(InputCasts, Attention) {
  expect_no_casts_needed([](const Feed& feed) {
    nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(10, 2));
    const auto x = torch::randn({5, kRows, 10});
    const auto memory = torch::randn({6, kRows, 10});
    return model_of(
        unit_per_parameter({{"attention", attention.ptr()}}),
        [=](const Tensor&) mutable {
          const auto& weight = attention->in_proj_weight;
          const auto keys = feed(memory, weight);
          return std::get<0>(attention(feed(x, weight), keys, keys))
              .pow(2)
              .mean();
        });
  });
}

TEST(InputCasts, ListsOptionalTensorsAndWeightedBags) {
  expect_no_casts_needed([](const Feed& feed) {
    const auto w = random_parameter({11, 9});
    const auto scale = random_parameter({9});
    const auto x = torch::randn({kRows, 9});
    const auto words = torch::randint(0, 11, {kRows, 4});
    const auto shares = torch::rand({kRows, 4});
    return model_of(
        unit_per_tensor({{"w", w}, {"scale", scale}}), [=](const Tensor&) {
          const auto y = feed(x, w);
          const auto options = F::EmbeddingBagFuncOptions()
                                   .mode(torch::kSum)
                                   .per_sample_weights(feed(shares, w));
          return at::cat({y, w}).pow(2).mean() +
              at::einsum("bi,ji->bj", {y, w}).pow(2).mean() +
              at::layer_norm(y, {9}, scale).pow(2).mean() +
              F::embedding_bag(words, w, options).pow(2).mean();
        });
  });
}

TEST(InputCasts, RecomputationAndSecondDerivatives) {
  expect_no_casts_needed([](const Feed& feed) {
    nn::Linear first(9, 17);
    nn::Linear last(17, 9);
    const auto x = torch::randn({kRows, 9});
    return model_of(
        unit_per_parameter({{"first", first.ptr()}, {"last", last.ptr()}}),
        [=](const Tensor&) mutable {
          const auto input = x.clone().requires_grad_();
          const auto y = last(torch::tanh(first(feed(input, first->weight))));
          const auto gradient =
              torch::autograd::grad({y.sum()}, {input}, {}, true, true)[0];
          return gradient.pow(2).mean() + y.pow(2).mean();
        });
  });
}

/// Without casts the program is told, by libtorch, that types differ.
TEST(InputCasts, CanBeSwitchedOff) {
  nn::Linear linear(9, 9);
  const auto x = torch::randn({2, 9});
  ShardedTensors net(
      unit_per_module({{"linear", linear.ptr()}}),
      World(),
      Options().mixed_precision(
          {.param_dtype = at::kBFloat16, .cast_inputs = false}));
  const auto error = error_of([&] { net.call([&] { return linear(x); }); });
  EXPECT_NE(error.find("same dtype"), std::string::npos) << error;
  const auto y = net.call([&] { return linear(cast_like(x, linear->weight)); });
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
}

} // namespace
} // namespace input_casts
} // namespace fsdp::testing
