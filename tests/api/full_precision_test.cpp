// Modules that keep their type in a net that computes in another; buffers.

#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

namespace fsdp::testing {
namespace full_precision {

namespace nn = torch::nn;
using at::Tensor;

constexpr MixedPrecision kHalf = {.param_dtype = at::kBFloat16};
constexpr MixedPrecision kHalfReducedInFloat = {
    .param_dtype = at::kBFloat16,
    .reduce_dtype = at::kFloat};

Tensor loss_of(const Tensor& y) {
  return y.to(at::kFloat).pow(2).mean();
}

// Modules in full precision.

struct NormsImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(7, 16));
  nn::LayerNorm norm =
      register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})));
  nn::Linear last = register_module("last", nn::Linear(16, 3));
  std::vector<at::ScalarType> types; // of what the modules gave, last time

  Tensor forward(const Tensor& x) {
    const auto a = first(x);
    const auto b = norm(a);
    const auto c = last(b);
    types = {a.scalar_type(), b.scalar_type(), c.scalar_type()};
    return c;
  }
};

/// Weights with more bits than bfloat16 has.
auto make_norms() {
  auto module = std::make_shared<NormsImpl>();
  const torch::NoGradGuard no_grad;
  module->norm->weight.copy_(1 + wave({16}) / 300);
  module->norm->bias.copy_(wave({16}, 0.9) / 300);
  return module;
}

TEST(Precision, NormsInFullPrecisionComputeInTheirOwnType) {
  static constexpr auto kHalfType = at::kBFloat16;
  const auto plain = seeded(make_norms);
  const auto x = wave({4, 7});
  Tensor expected;
  {
    const torch::NoGradGuard no_grad;
    const auto in_half = [&](nn::Linear& linear, const Tensor& y) {
      return torch::linear(
          y.to(kHalfType),
          linear->weight.to(kHalfType),
          linear->bias.to(kHalfType));
    };
    expected = in_half(
        plain->last, plain->norm(in_half(plain->first, x).to(at::kFloat)));
  }
  for (const bool own_unit : {false, true}) {
    for (const auto strategy : kAllStrategies) {
      on_ranks(3, [&](const World& world) {
        auto options = Options()
                           .strategy(strategy)
                           .mixed_precision(kHalfReducedInFloat)
                           .full_precision(each<nn::LayerNorm>());
        if (own_unit) {
          options.units(each<nn::LayerNorm>());
        }
        FullyShardedDataParallel net(seeded(make_norms), world, options);
        const auto y = net(x);
        EXPECT_EQ(
            net->types,
            (std::vector<at::ScalarType>{kHalfType, at::kFloat, kHalfType}));
        EXPECT_TRUE(at::equal(y, expected));
        loss_of(y).backward();
        EXPECT_NO_THROW(whole_gradients(net)); // all of them, in float32
        net.call([](NormsImpl& module) {
          EXPECT_EQ(module.norm->weight.scalar_type(), at::kFloat);
          EXPECT_EQ(module.first->weight.scalar_type(), kHalfType);
        });
      });
    }
  }
}

TEST(Precision, APolicyOfAUnitReplacesThatOfTheNet) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_norms),
        world,
        Options().mixed_precision(kHalf).units(
            named("norm", UnitOptions().mixed_precision({})) |
            named(
                "last",
                UnitOptions().mixed_precision({.param_dtype = at::kDouble}))));
    net(wave({4, 7}));
    EXPECT_EQ(
        net->types,
        (std::vector<at::ScalarType>{at::kBFloat16, at::kFloat, at::kDouble}));
  });
}

TEST(Precision, AFullPrecisionRuleThatMatchesNothingIsRefused) {
  for (const auto& rule :
       {each<nn::BatchNorm1d>(), named("norn"), together({"norm", "norn"})}) {
    const auto error = error_of([&] {
      FullyShardedDataParallel(
          make_norms(), World(), Options().full_precision(rule));
    });
    EXPECT_TRUE(contains(error, "full_precision")) << error;
    EXPECT_TRUE(contains(error, "matches no module")) << error;
  }
}

// Buffers.

struct BuffersImpl : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(7, 16));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(16));
  Tensor table = register_buffer("table", wave({16}));
  Tensor steps = register_buffer("steps", torch::zeros({1}, torch::kLong));
  Tensor forward(const Tensor& x) { return norm(linear(x)) + table; }
};

auto make_buffers() {
  return std::make_shared<BuffersImpl>();
}

TEST(Precision, BuffersKeepTheirTypeUnlessOneIsAskedFor) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_buffers),
        world,
        Options()
            .mixed_precision(kHalfReducedInFloat)
            .full_precision(each<nn::BatchNorm1d>()));
    const auto plain = seeded(make_buffers);
    for (int step = 0; step < 3; ++step) {
      const auto x = wave({4, 7}, 0.7 + step);
      loss_of(net(x)).backward();
      const torch::NoGradGuard no_grad;
      const auto& linear = plain->linear;
      plain->norm(torch::linear(
                      x.to(at::kBFloat16),
                      linear->weight.to(at::kBFloat16),
                      linear->bias.to(at::kBFloat16))
                      .to(at::kFloat));
    }
    EXPECT_EQ(net->table.scalar_type(), at::kFloat);
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(net->norm->running_var.scalar_type(), at::kFloat);
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 3);
    EXPECT_TRUE(at::equal(net->norm->running_mean, plain->norm->running_mean));
    EXPECT_TRUE(at::equal(net->norm->running_var, plain->norm->running_var));
  });
}

TEST(Precision, BuffersAreCastOnceAndThoseInFullPrecisionAreNot) {
  on_ranks(2, [](const World& world) {
    const auto module = seeded(make_buffers);
    const auto table = module->table; // the tensor keeps its identity
    const auto values = table.clone();
    FullyShardedDataParallel net(
        module,
        world,
        Options()
            .mixed_precision(
                {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16})
            .full_precision(each<nn::BatchNorm1d>()));
    EXPECT_TRUE(net->table.is_same(table));
    EXPECT_TRUE(at::equal(table, values.to(at::kBFloat16)));
    EXPECT_EQ(net->steps.scalar_type(), at::kLong);
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), at::kLong);
    // Cast once: what the program puts there later stays.
    net->table.set_data(values);
    net(wave({4, 7}));
    EXPECT_EQ(net->table.scalar_type(), at::kFloat);
  });
}

TEST(Precision, BuffersOfAUnitFollowItsPolicy) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_buffers),
        world,
        Options().units(named(
            "norm",
            UnitOptions().mixed_precision({.buffer_dtype = at::kDouble}))));
    EXPECT_EQ(net->table.scalar_type(), at::kFloat);
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kDouble);
  });
}

TEST(Precision, BuffersComeFromRankZeroAndAreCastThen) {
  on_ranks(3, [](const World& world) {
    const auto module = seeded(make_buffers);
    if (world.rank() != 0) {
      const torch::NoGradGuard no_grad;
      for (const auto& buffer : module->buffers()) {
        buffer.is_floating_point() ? buffer.fill_(NAN) : buffer.fill_(-7);
      }
    }
    FullyShardedDataParallel net(
        module,
        world,
        Options().sync_module_states(true).mixed_precision(
            {.buffer_dtype = at::kBFloat16}));
    EXPECT_TRUE(at::equal(net->table, wave({16}).to(at::kBFloat16)));
    EXPECT_TRUE(
        at::equal(net->norm->running_var, torch::ones({16}, torch::kBFloat16)));
    EXPECT_EQ(net->steps.item<int64_t>(), 0);
  });
}

} // namespace full_precision
} // namespace fsdp::testing
