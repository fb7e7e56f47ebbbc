// Units that compute in different types, with model code that knows of none.

#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace mixed_units {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int kSteps = 6;

/// A chain whose middle computes in float32 while its ends compute in bfloat16.
/// `casts`: what the model must do by hand where no library does it.
struct ChainImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(15, 33));
  nn::LayerNorm norm =
      register_module("norm", nn::LayerNorm(nn::LayerNormOptions({33})));
  nn::Linear last = register_module("last", nn::Linear(33, 15));
  std::vector<at::ScalarType> types; // of the three outputs, in the last call

  Tensor forward(const Tensor& x) {
    const auto a = first(x);
    const auto b = norm(a);
    const auto c = last(torch::gelu(b));
    types = {a.scalar_type(), b.scalar_type(), c.scalar_type()};
    return c.to(at::kFloat).pow(2).mean();
  }
  Tensor forward_with_casts(const Tensor& x) {
    const auto a = first(cast_like(x, first->weight));
    const auto b = norm(cast_like(a, norm->weight));
    const auto c = last(cast_like(torch::gelu(b), last->weight));
    return c.to(at::kFloat).pow(2).mean();
  }
};
TORCH_MODULE(Chain);

/// A convolution in bfloat16 and a batch normalisation, whose statistics are in
/// float32, in float32.
struct ImagesImpl : nn::Module {
  nn::Conv2d first = register_module("first", nn::Conv2d(3, 5, 3));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(5));
  nn::Conv2d last = register_module("last", nn::Conv2d(5, 4, 3));
  std::vector<at::ScalarType> types;

  Tensor forward(const Tensor& x) {
    const auto a = first(x);
    const auto b = norm(a);
    const auto c = last(b.relu());
    types = {a.scalar_type(), b.scalar_type(), c.scalar_type()};
    return c.to(at::kFloat).pow(2).mean();
  }
  Tensor forward_with_casts(const Tensor& x) {
    const auto a = first(cast_like(x, first->weight));
    const auto b = norm(cast_like(a, norm->weight));
    const auto c = last(cast_like(b.relu(), last->weight));
    return c.to(at::kFloat).pow(2).mean();
  }
};
TORCH_MODULE(Images);

template <class M>
std::pair<std::shared_ptr<M>, Tensor> build_with_input(
    const std::vector<int64_t>& sizes) {
  std::shared_ptr<M> module;
  Tensor x;
  build([&] {
    module = std::make_shared<M>();
    x = torch::randn(sizes);
    return TestModel();
  });
  return {module, x};
}

/// Every rank takes the same batch, so that means over ranks are exact.
template <class M>
Training train_by_hand(const std::vector<int64_t>& sizes) {
  const auto [module, x] = build_with_input<M>(sizes);
  std::vector<std::pair<std::string, Tensor>> parameters;
  for (const auto& parameter : module->named_parameters()) {
    parameters.emplace_back(parameter.key(), parameter.value());
  }
  MasterWeights weights(
      parameters, [](const std::string& name) -> std::optional<at::ScalarType> {
        return name.starts_with("norm") ? at::kFloat : at::kBFloat16;
      });
  const auto optimizer = make_optimizer(weights.masters(), {});
  Training training;
  for (int step = 0; step < kSteps; ++step) {
    weights.hand_out();
    const auto loss = module->forward_with_casts(x);
    loss.backward();
    weights.take_back();
    optimizer->step();
    optimizer->zero_grad();
    training.losses.push_back(loss.template item<double>());
  }
  training.parameters = weights.values();
  return training;
}

Options bfloat16_around_float32(Strategy strategy) {
  const auto half = UnitOptions().mixed_precision(
      {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  return Options().strategy(strategy).units(
      named("first", half) | named("norm") | named("last", half));
}

template <class M>
Training train_units(
    const World& world,
    Strategy strategy,
    const std::vector<int64_t>& sizes) {
  const auto [module, x] = build_with_input<M>(sizes);
  FullyShardedDataParallel<M> net(
      module, world, bfloat16_around_float32(strategy));
  const auto optimizer = make_optimizer(net.parameters(), {});
  Training training;
  for (int step = 0; step < kSteps; ++step) {
    const auto loss = net(x);
    EXPECT_EQ(
        module->types,
        (std::vector<at::ScalarType>{
            at::kBFloat16, at::kFloat, at::kBFloat16}));
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    training.losses.push_back(
        mean_over_ranks(world, loss.template item<double>()));
  }
  training.parameters = values_at_rest(net);
  return training;
}

template <class M>
void expect_same_as_by_hand(const std::vector<int64_t>& sizes) {
  const auto expected = train_by_hand<M>(sizes);
  const ParitySettings settings;
  for (const int world_size : settings.world_sizes) {
    for (const auto strategy : settings.strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      const auto rank_main = [&](const World& world) {
        const auto actual = train_units<M>(world, strategy, sizes);
        expect_same(expected, actual, settings);
      };
      ASSERT_NO_THROW(
          run_ranks(world_size, rank_main, std::chrono::seconds(30)));
    }
  }
}

TEST(MixedUnits, Bfloat16AroundALayerNormInFloat32) {
  expect_same_as_by_hand<ChainImpl>({kRows, 15});
}

TEST(MixedUnits, Bfloat16AroundABatchNormInFloat32) {
  expect_same_as_by_hand<ImagesImpl>({kRows, 3, 7, 7});
}

/// Gradients are reduced in the type in which they arrive; with a power of two
/// as the number of ranks the mean of equal gradients is exact in bfloat16 too.
TEST(MixedUnits, ReducesInTheComputeTypeByDefault) {
  const auto make = [] {
    nn::Linear first(15, 17);
    nn::Linear last(17, 15);
    const auto x = torch::randn({kRows, 15});
    return model_of(
        unit_per_module({{"first", first.ptr()}, {"last", last.ptr()}}),
        [=](const Tensor&) mutable {
          const auto y = torch::tanh(first(cast_like(x, first->weight)));
          return last(y).pow(2).mean();
        });
  };
  const auto train = [&](const MixedPrecision& policy, int world_size) {
    auto settings = same_batch();
    settings.options.mixed_precision(policy);
    return train_sharded(make, settings, world_size, Strategy::kFullShard);
  };
  for (const int world_size : {1, 2, 4}) {
    SCOPED_TRACE("world size " + std::to_string(world_size));
    const auto expected = train(
        {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, world_size);
    for (const auto& [rank, actual] :
         train({.param_dtype = at::kBFloat16}, world_size)) {
      expect_identical(expected.at(rank), actual);
    }
  }
}

} // namespace
} // namespace mixed_units
} // namespace fsdp::testing
