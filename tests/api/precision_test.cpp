// Types of weights, gradients, buffers and results.

#include "api/models.h"
#include "api/program.h"
#include "harness/forwarding_communicator.h"
#include "harness/mixed_precision.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace precision {

namespace nn = torch::nn;
using at::Tensor;

/// Odd widths; its operators are there for all floating point types.
struct MlpImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(7, 13));
  nn::Linear second = register_module("second", nn::Linear(13, 11));
  nn::Linear last = register_module("last", nn::Linear(11, 3));
  Tensor forward(const Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
};

auto make_mlp() {
  return std::make_shared<MlpImpl>();
}

const auto kUnits = Options().units(named("second") | named("last"));

// Training, compared with casts by hand.

/// 's': a micro-batch that synchronises, 'n': one that does not.
struct Case {
  Strategy strategy;
  int world_size;
  int shard_size; // of hybrid strategies; else the world size
  MixedPrecision policy;
  std::string sequence;
};

at::ScalarType reduce_type(const MixedPrecision& policy) {
  return policy.reduce_dtype.value_or(policy.param_dtype.value_or(at::kFloat));
}

/// As the library promises: summed in float32 in rank order, rounded once.
Tensor mean_of(const std::vector<Tensor>& parts, at::ScalarType type) {
  auto sum = parts[0].to(at::kFloat);
  for (size_t i = 1; i < parts.size(); ++i) {
    sum = sum + parts[i].to(at::kFloat);
  }
  return (sum / static_cast<double>(parts.size())).to(type);
}

/// Inside of each group, and then over the groups.
Tensor reduce_by_hand(
    const std::vector<Tensor>& of_ranks,
    size_t shard_size,
    at::ScalarType type) {
  std::vector<Tensor> of_groups;
  for (size_t begin = 0; begin < of_ranks.size(); begin += shard_size) {
    const auto first = of_ranks.begin() + static_cast<int64_t>(begin);
    of_groups.push_back(mean_of(
        {first, first + static_cast<int64_t>(shard_size)}, type));
  }
  return of_groups.size() == 1 ? of_groups[0] : mean_of(of_groups, type);
}

Tensor batch(int step, int micro, int64_t rank, int64_t ranks) {
  const auto all = wave({kRows, 7}, 0.7 + step + 0.1 * micro);
  const auto share = kRows / ranks;
  return all.narrow(0, rank * share, share);
}

Tensor loss_of(const Tensor& y) {
  return y.to(at::kFloat).pow(2).mean();
}

constexpr int kSteps = 3;

NamedValues train_by_hand(const Case& each) {
  const auto module = seeded(make_mlp);
  const auto named = distinct_parameters(*module);
  MasterWeights weights(named, [&](const std::string&) {
    return each.policy.param_dtype;
  });
  torch::optim::SGD optimizer(
      weights.masters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  const auto type = reduce_type(each.policy);
  const auto compute = each.policy.param_dtype.value_or(at::kFloat);
  for (int step = 0; step < kSteps; ++step) {
    weights.hand_out();
    std::vector<Tensor> total(named.size()); // at rest
    std::vector<std::vector<Tensor>> waiting(named.size()); // by rank
    for (size_t micro = 0; micro < each.sequence.size(); ++micro) {
      for (int rank = 0; rank < each.world_size; ++rank) {
        const auto x =
            batch(step, static_cast<int>(micro), rank, each.world_size);
        loss_of(module->forward(x.to(compute))).backward();
        for (size_t i = 0; i < named.size(); ++i) {
          const auto parameter = named[i].second;
          const auto mine =
              std::exchange(parameter.mutable_grad(), Tensor()).to(type);
          if (waiting[i].size() <= static_cast<size_t>(rank)) {
            waiting[i].push_back(mine);
          } else {
            auto& sum = waiting[i][static_cast<size_t>(rank)];
            sum = sum + mine; // in the reduce type
          }
        }
      }
      if (each.sequence[micro] == 's') {
        for (size_t i = 0; i < named.size(); ++i) {
          const auto reduced =
              reduce_by_hand(
                  waiting[i], static_cast<size_t>(each.shard_size), type)
                  .to(at::kFloat);
          total[i] = total[i].defined() ? total[i] + reduced : reduced;
          waiting[i].clear();
        }
      }
    }
    weights.take_back();
    const auto masters = weights.masters();
    for (size_t i = 0; i < named.size(); ++i) {
      masters[i].mutable_grad() = total[i];
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return weights.values();
}

void expect_like_by_hand(const Case& each) {
  SCOPED_TRACE(
      "strategy " + std::to_string(static_cast<int>(each.strategy)) +
      ", world size " + std::to_string(each.world_size) + ", shard size " +
      std::to_string(each.shard_size) + ", " + each.sequence);
  const auto expected = train_by_hand(each);
  on_ranks(each.world_size, [&](const World& world) {
    auto options = kUnits;
    options.strategy(each.strategy)
        .shard_size(each.shard_size)
        .mixed_precision(each.policy);
    FullyShardedDataParallel net(seeded(make_mlp), world, options);
    torch::optim::SGD optimizer(
        net.parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      for (size_t micro = 0; micro < each.sequence.size(); ++micro) {
        std::optional<NoSync> no_sync;
        if (each.sequence[micro] == 'n') {
          no_sync.emplace(net.no_sync());
        }
        const auto x = batch(
            step, static_cast<int>(micro), world.rank(), each.world_size);
        loss_of(net(x)).backward();
      }
      for (const auto& parameter : net.parameters()) {
        EXPECT_EQ(parameter.scalar_type(), at::kFloat); // at rest
        EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto values = values_at_rest(net);
    ASSERT_EQ(values.size(), expected.size());
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(all_close(values[i].second, expected[i].second, 1e-6, 1e-8))
          << expected[i].first;
    }
  });
}

void expect_all_like_by_hand(const MixedPrecision& policy) {
  for (const std::string sequence : {"s", "ss", "nns"}) {
    for (const int size : {1, 2, 4}) { // means over these are exact
      for (const auto strategy : kAllStrategies) {
        expect_like_by_hand({strategy, size, size, policy, sequence});
      }
      for (const auto shard_size : all_shard_sizes(size)) {
        for (const auto strategy :
             {Strategy::kHybridShard, Strategy::kHybridShardGradOp}) {
          expect_like_by_hand(
              {strategy,
               size,
               static_cast<int>(shard_size),
               policy,
               sequence});
        }
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
  }
}

TEST(Precision, TrainingInFloat32IsLikeByHand) {
  expect_all_like_by_hand({});
}

TEST(Precision, TrainingInBFloat16IsLikeByHand) {
  expect_all_like_by_hand({.param_dtype = at::kBFloat16});
}

TEST(Precision, TrainingInBFloat16ReducedInFloat32IsLikeByHand) {
  expect_all_like_by_hand(
      {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
}

TEST(Precision, TrainingInFloat16IsLikeByHand) {
  expect_all_like_by_hand(
      {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat});
}

// Gathers and reductions.

/// Notes the bytes of gathers.
class GatherBytes final : public ForwardingCommunicator {
 public:
  explicit GatherBytes(World world)
      : ForwardingCommunicator(std::move(world)),
        bytes_(std::make_shared<size_t>(0)) {}
  GatherBytes(
      std::shared_ptr<Communicator> inner,
      std::shared_ptr<size_t> bytes)
      : ForwardingCommunicator(std::move(inner)),
        bytes_(std::move(bytes)) {}

  size_t& bytes() { return *bytes_; }

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    *bytes_ += buffer.size();
    return inner().all_gather(buffer, std::move(what));
  }
  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<GatherBytes>(inner().split(color, key), bytes_);
  }

 private:
  std::shared_ptr<size_t> bytes_;
};

TEST(Precision, GathersAreInTheComputeTypeAndWhatIsAtRestIsNot) {
  on_ranks(2, [](const World& world) {
    std::map<bool, size_t> bytes;
    for (const bool half : {false, true}) {
      const auto counter = std::make_shared<GatherBytes>(world);
      auto options = kUnits;
      if (half) {
        options.mixed_precision({.param_dtype = at::kBFloat16});
      }
      FullyShardedDataParallel net(seeded(make_mlp), World(counter), options);
      torch::optim::AdamW optimizer(net.parameters(), 1e-2);
      const auto rest = net.memory().shard_bytes;
      counter->bytes() = 0;
      loss_of(net(wave({4, 7}))).backward();
      bytes[half] = counter->bytes();
      optimizer.step();
      EXPECT_EQ(net.memory().shard_bytes, rest);
      EXPECT_EQ(net.memory().gradient_bytes, [&] {
        int64_t sum = 0;
        for (const auto& parameter : net.parameters()) {
          sum += parameter.numel() * 4;
        }
        return sum;
      }());
    }
    EXPECT_EQ(bytes[true] * 2, bytes[false]);
    EXPECT_GT(bytes[true], 0U);
  });
}

/// y = w * sum(x), so that the gradient of every element is sum(x).
struct Scale : nn::Module {
  Tensor w = register_parameter("w", torch::ones({130}));
  Tensor forward(double gradient) { return (w * gradient).sum(); }
};

std::optional<double> gradient_of(
    const World& world,
    const MixedPrecision& policy,
    const std::vector<double>& micro_batches) {
  FullyShardedDataParallel net(
      std::make_shared<Scale>(),
      world,
      Options().mixed_precision(policy).gradient_divide_factor(1.0));
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    std::optional<NoSync> no_sync;
    if (i + 1 < micro_batches.size()) {
      no_sync.emplace(net.no_sync());
    }
    net(micro_batches[i]).backward();
  }
  const auto gradient = whole_gradients(net)[0].second;
  EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(gradient, gradient[0].expand_as(gradient)));
  return gradient[0].item<double>();
}

constexpr MixedPrecision kHalf = {.param_dtype = at::kBFloat16};
constexpr MixedPrecision kHalfReducedInFloat = {
    .param_dtype = at::kBFloat16,
    .reduce_dtype = at::kFloat};

TEST(Precision, ReductionInFloat32KeepsSmallContributionsOfRanks) {
  on_ranks(4, [](const World& world) {
    const double mine = world.rank() == 0 ? 256.0 : 1.0;
    EXPECT_EQ(gradient_of(world, kHalfReducedInFloat, {mine}), 259.0);
    EXPECT_EQ(gradient_of(world, kHalf, {mine}), 260.0); // rounded once
  });
}

TEST(Precision, ReductionInFloat32KeepsSmallContributionsOfMicroBatches) {
  for (const int size : {1, 2}) {
    on_ranks(size, [](const World& world) {
      const std::vector<double> large_first = {256, 1, 1, 1, 1, 1, 1, 1, 1};
      const double ranks = world.size();
      EXPECT_EQ(
          gradient_of(world, kHalfReducedInFloat, large_first), 264.0 * ranks);
      EXPECT_EQ(gradient_of(world, kHalf, large_first), 256.0 * ranks);
      std::vector<double> tiny(65, std::exp2(-9));
      tiny[0] = 1.0;
      EXPECT_EQ(gradient_of(world, kHalfReducedInFloat, tiny), 1.125 * ranks);
      EXPECT_EQ(gradient_of(world, kHalf, tiny), 1.0 * ranks);
    });
  }
}

TEST(Precision, TheClippedNormIsSummedInFloat32OrBetter) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    on_ranks(2, [&](const World& world) {
      const auto make = [&] {
        auto module = std::make_shared<Scale>();
        module->to(type);
        return module;
      };
      FullyShardedDataParallel net(make(), world);
      net(1.0).backward();
      // A sum of 130 ones in bfloat16 would be 128 or 130; its root is not.
      EXPECT_NEAR(net.clip_grad_norm_(1000.0), std::sqrt(130.0), 1e-5);
    });
  }
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
        Options()
            .mixed_precision(kHalf)
            .units(
                named("norm", UnitOptions().mixed_precision({})) |
                named(
                    "last",
                    UnitOptions().mixed_precision(
                        {.param_dtype = at::kDouble}))));
    net(wave({4, 7}));
    EXPECT_EQ(
        net->types,
        (std::vector<at::ScalarType>{at::kBFloat16, at::kFloat, at::kDouble}));
  });
}

TEST(Precision, AFullPrecisionRuleThatMatchesNothingIsRefused) {
  const auto error = error_of([] {
    FullyShardedDataParallel(
        make_norms(),
        World(),
        Options().full_precision(each<nn::BatchNorm1d>()));
  });
  EXPECT_TRUE(contains(error, "full_precision")) << error;
  EXPECT_TRUE(contains(error, "matches no module")) << error;
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
        Options().mixed_precision(kHalfReducedInFloat).full_precision(
            each<nn::BatchNorm1d>()));
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
    EXPECT_TRUE(at::equal(
        net->norm->running_var, torch::ones({16}, torch::kBFloat16)));
    EXPECT_EQ(net->steps.item<int64_t>(), 0);
  });
}

// Results.

struct Output {
  Tensor logits;
  std::vector<Tensor> hidden;
  int count = 0;
};
template <class F>
void for_each_tensor(Output& output, F&& visit) {
  visit(output.logits);
  for (auto& each : output.hidden) {
    visit(each);
  }
}

struct ResultsImpl : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(7, 3));
  Tensor kept;
  Tensor forward(const Tensor& x) { return linear(x); }
};

TEST(Precision, ResultsAreCastToTheOutputType) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded([] { return std::make_shared<ResultsImpl>(); }),
        world,
        Options().mixed_precision(
            {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}));
    const auto x = wave({4, 7});
    const auto run = [&](auto&& body) {
      return net.call([&](ResultsImpl& module) { return body(module.forward(x)); });
    };
    EXPECT_EQ(net(x).scalar_type(), at::kFloat);
    const auto [y, n, z] = run([](const Tensor& t) {
      return std::make_tuple(t, 7, std::make_pair(t.argmax(1), t));
    });
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_EQ(n, 7);
    EXPECT_EQ(z.first.scalar_type(), at::kLong); // no floating point type
    EXPECT_EQ(z.second.scalar_type(), at::kFloat);
    const auto all = run([](const Tensor& t) {
      return std::vector<std::optional<Tensor>>{t, std::nullopt, Tensor()};
    });
    EXPECT_EQ(all[0]->scalar_type(), at::kFloat);
    EXPECT_FALSE(all[1].has_value());
    EXPECT_FALSE(all[2]->defined());
    const auto by_name = run([](const Tensor& t) {
      return std::map<std::string, std::array<Tensor, 2>>{{"a", {t, t}}};
    });
    EXPECT_EQ(by_name.at("a")[1].scalar_type(), at::kFloat);
    const auto output =
        run([](const Tensor& t) { return Output{t, {t, t}, 3}; });
    EXPECT_EQ(output.logits.scalar_type(), at::kFloat);
    EXPECT_EQ(output.hidden[1].scalar_type(), at::kFloat);
    EXPECT_EQ(output.count, 3);
    const auto nested = run([](const Tensor& t) {
      return std::vector<Output>{Output{t, {}, 0}};
    });
    EXPECT_EQ(nested[0].logits.scalar_type(), at::kFloat);
  });
}

TEST(Precision, ResultsByReferenceAreLeftAlone) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded([] { return std::make_shared<ResultsImpl>(); }),
        world,
        Options().mixed_precision(
            {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}));
    auto& kept = net.call([](ResultsImpl& module) -> Tensor& {
      module.kept = module.forward(wave({4, 7}));
      return module.kept;
    });
    EXPECT_EQ(&kept, &net->kept);
    EXPECT_EQ(kept.scalar_type(), at::kBFloat16);
  });
}

TEST(Precision, ACastResultHasAGradient) {
  on_ranks(2, [](const World& world) {
    auto options = kUnits;
    FullyShardedDataParallel cast(
        seeded(make_mlp),
        world,
        options.mixed_precision(
            {.param_dtype = at::kBFloat16,
             .reduce_dtype = at::kFloat,
             .output_dtype = at::kFloat}));
    FullyShardedDataParallel by_hand(
        seeded(make_mlp), world, options.mixed_precision(kHalfReducedInFloat));
    cast(wave({4, 7})).pow(2).mean().backward();
    by_hand(wave({4, 7})).to(at::kFloat).pow(2).mean().backward();
    expect_same_bits(whole_gradients(by_hand), whole_gradients(cast));
  });
}

} // namespace precision
} // namespace fsdp::testing
