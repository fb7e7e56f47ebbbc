// Recurrent networks, whose operators take all weights at once, with every
// parameter in a unit of its own.

#include "harness/evaluation.h"
#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace recurrent {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kInputs = 7;
constexpr int64_t kHidden = 9;
constexpr int64_t kTime = 5;

/// `make_module` returns the holder of a recurrent network.
template <class F>
MakeModel outputs_of(F make_module) {
  return [make_module] {
    auto module = make_module();
    const auto x = torch::randn({kTime, kRows, kInputs});
    return model_of(
        unit_per_parameter({{"module", module.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto weight = module->parameters().front();
          return std::get<0>(
              module(cast_like(x.index_select(1, rows), weight)));
        });
  };
}

template <class F>
MakeModel loss_of(F make_module) {
  return [make = outputs_of(make_module)] {
    auto model = make();
    model.loss = [outputs = model.loss](const Tensor& rows) {
      return outputs(rows).pow(2).mean();
    };
    return model;
  };
}

TEST(RecurrentParity, BidirectionalGru) {
  expect_same_training_in_both_types(loss_of([] {
    return nn::GRU(
        nn::GRUOptions(kInputs, kHidden).num_layers(2).bidirectional(true));
  }));
}

TEST(RecurrentParity, RnnWithTanh) {
  expect_same_training_in_both_types(loss_of(
      [] { return nn::RNN(nn::RNNOptions(kInputs, kHidden).num_layers(2)); }));
}

TEST(RecurrentParity, RnnWithRelu) {
  expect_same_training(loss_of([] {
    return nn::RNN(nn::RNNOptions(kInputs, kHidden).nonlinearity(torch::kReLU));
  }));
}

TEST(RecurrentParity, LstmWithProjection) {
  expect_same_training_in_both_types(loss_of([] {
    return nn::LSTM(
        nn::LSTMOptions(kInputs, kHidden).num_layers(2).proj_size(4));
  }));
}

TEST(RecurrentParity, LstmWithAUnitPerParameter) {
  expect_same_training_in_both_types(loss_of([] {
    return nn::LSTM(nn::LSTMOptions(kInputs, kHidden).num_layers(2));
  }));
}

TEST(RecurrentParity, LstmEvaluatedWithoutGradients) { // an operator of its own
  const auto make = outputs_of([] {
    nn::LSTM module(nn::LSTMOptions(kInputs, kHidden).num_layers(2));
    module->eval();
    return module;
  });
  expect_same_value(make);
  expect_same_value_in_bfloat16(make);
}

TEST(RecurrentParity, Cells) {
  expect_same_training_in_both_types([] {
    nn::LSTMCell first(kInputs, kHidden);
    nn::GRUCell second(kHidden, kHidden);
    nn::RNNCell third(kHidden, kInputs);
    const auto x = torch::randn({kRows, kInputs});
    return model_of(
        unit_per_parameter(
            {{"first", first.ptr()},
             {"second", second.ptr()},
             {"third", third.ptr()}}),
        [=](const Tensor& rows) mutable {
          auto y = cast_like(x.index_select(0, rows), first->weight_ih);
          for (int i = 0; i < 2; ++i) { // weights are shared over time
            y = third(second(std::get<0>(first(y))));
          }
          return y.pow(2).mean();
        });
  });
}

} // namespace
} // namespace recurrent
} // namespace fsdp::testing
