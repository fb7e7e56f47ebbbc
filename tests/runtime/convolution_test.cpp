// Convolutions and normalisations with every parameter in a unit of its own.

#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace convolution {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// `make_module` returns the holder of a convolution; `sizes` are those of one
/// row of its input.
template <class F>
MakeModel convolution_of(F make_module, std::vector<int64_t> sizes) {
  sizes.insert(sizes.begin(), kRows);
  return [make_module, sizes] {
    auto module = make_module();
    const auto x = torch::randn(sizes);
    return model_of(
        unit_per_parameter({{"module", module.ptr()}}),
        [=](const Tensor& rows) mutable {
          return module(cast_like(x.index_select(0, rows), module->weight))
              .pow(2)
              .mean();
        });
  };
}

TEST(ConvolutionParity, DilatedIn1d) {
  expect_same_training_in_both_types(convolution_of(
      [] { return nn::Conv1d(nn::Conv1dOptions(4, 6, 3).dilation(2)); },
      {4, 9}));
}

TEST(ConvolutionParity, PaddedIn2d) {
  expect_same_training_in_both_types(convolution_of(
      [] {
        return nn::Conv2d(nn::Conv2dOptions(4, 6, 3).padding(1).padding_mode(
            torch::kReflect));
      },
      {4, 5, 5}));
}

TEST(ConvolutionParity, GroupedIn3d) {
  expect_same_training_in_both_types(convolution_of(
      [] { return nn::Conv3d(nn::Conv3dOptions(4, 6, 3).groups(2)); },
      {4, 4, 4, 4}));
}

TEST(ConvolutionParity, TransposedIn1d) {
  expect_same_training_in_both_types(convolution_of(
      [] { return nn::ConvTranspose1d(nn::ConvTranspose1dOptions(4, 6, 3)); },
      {4, 9}));
}

TEST(ConvolutionParity, TransposedAndStridedIn2d) {
  expect_same_training_in_both_types(convolution_of(
      [] {
        return nn::ConvTranspose2d(
            nn::ConvTranspose2dOptions(4, 6, 3).stride(2));
      },
      {4, 5, 5}));
}

TEST(ConvolutionParity, TransposedIn3d) {
  expect_same_training_in_both_types(convolution_of(
      [] { return nn::ConvTranspose3d(nn::ConvTranspose3dOptions(4, 6, 3)); },
      {4, 4, 4, 4}));
}

/// Sharded weights are contiguous, replicated ones keep their strides, for
/// which libtorch computes in another way: equal bits are not to be expected.
TEST(ConvolutionParity, WeightThatWasChannelsLast) {
  const auto make = [] {
    const auto channels_last = at::MemoryFormat::ChannelsLast;
    const auto weight =
        torch::randn({5, 3, 3, 3}).contiguous(channels_last).requires_grad_();
    const auto x = torch::randn({kRows, 3, 6, 6}).contiguous(channels_last);
    return model_of(
        unit_per_tensor({{"weight", weight}}), [=](const Tensor& rows) {
          return at::conv2d(cast_like(x.index_select(0, rows), weight), weight)
              .pow(2)
              .mean();
        });
  };
  ParitySettings settings;
  settings.strategies = {Strategy::kFullShard, Strategy::kShardGradOp};
  expect_same_training_in_both_types(make, settings);
  settings.strategies = {Strategy::kNoShard};
  expect_same_training_in_both_types(make, settings);
}

TEST(NormalisationParity, GroupInstanceLayerPreluAndBilinear) {
  expect_same_training_in_both_types([] {
    nn::GroupNorm group(nn::GroupNormOptions(2, 4));
    nn::InstanceNorm2d instance(nn::InstanceNorm2dOptions(4).affine(true));
    nn::LayerNorm layer(nn::LayerNormOptions({5}));
    nn::PReLU activation(nn::PReLUOptions().num_parameters(4));
    nn::Bilinear bilinear(5, 5, 3);
    const auto x = torch::randn({kRows, 4, 5, 5});
    return model_of(
        unit_per_parameter(
            {{"group", group.ptr()},
             {"instance", instance.ptr()},
             {"layer", layer.ptr()},
             {"activation", activation.ptr()},
             {"bilinear", bilinear.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto y = cast_like(x.index_select(0, rows), group->weight);
          // A sum, not a chain: a shift before a normalisation has no effect,
          // so that its gradient would be rounding noise.
          const auto z = activation(group(y) + instance(y) + layer(y));
          return bilinear(z, z * 0.5).pow(2).mean();
        });
  });
}

/// Statistics are those of the whole batch, so that all ranks must take it.
TEST(NormalisationParity, BatchNormInTrainingAndEvaluation) {
  expect_same_training(
      [] {
        nn::Conv2d conv(3, 4, 3);
        nn::BatchNorm2d norm(4);
        const auto images = torch::randn({kRows, 3, 6, 6});
        return model_of(
            unit_per_parameter({{"conv", conv.ptr()}, {"norm", norm.ptr()}}),
            [=](const Tensor&) mutable {
              const auto y = conv(images);
              const auto trained = norm(y).relu().mean();
              norm->eval();
              const auto evaluated = norm(y).pow(2).mean();
              norm->train();
              return trained + evaluated + norm->weight.sum() * 0.1;
            });
      },
      same_batch());
}

/// Buffers are no parameters: they keep their type when parameters are cast,
/// and libtorch wants the scale of a normalisation in the type of its
/// statistics. A cast of the statistics would lose what the operator writes to
/// them.
TEST(NormalisationParity, BatchNormInBfloat16FailsAsInLibtorch) {
  const auto x = torch::randn({kRows, 5});
  nn::BatchNorm1d plain(5);
  plain->weight.set_data(plain->weight.to(at::kBFloat16));
  plain->bias.set_data(plain->bias.to(at::kBFloat16));
  const auto expected = error_of([&] { plain(x.to(at::kBFloat16)); });
  ASSERT_NE(expected, "");

  nn::BatchNorm1d norm(5);
  ShardedTensors net(
      unit_per_module({{"norm", norm.ptr()}}),
      World(),
      Options().mixed_precision({.param_dtype = at::kBFloat16}));
  EXPECT_EQ(error_of([&] { net.call([&] { return norm(x); }); }), expected);
}

} // namespace
} // namespace convolution
} // namespace fsdp::testing
