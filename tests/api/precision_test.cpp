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
    of_groups.push_back(
        mean_of({first, first + static_cast<int64_t>(shard_size)}, type));
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
  MasterWeights weights(
      named, [&](const std::string&) { return each.policy.param_dtype; });
  torch::optim::SGD optimizer(
      weights.masters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  const auto type = reduce_type(each.policy);
  const auto compute = each.policy.param_dtype.value_or(at::kFloat);
  for (int step = 0; step < kSteps; ++step) {
    weights.hand_out();
    std::vector<Tensor> total(named.size());                // at rest
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
        const auto x =
            batch(step, static_cast<int>(micro), world.rank(), each.world_size);
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
              {strategy, size, static_cast<int>(shard_size), policy, sequence});
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

} // namespace precision
} // namespace fsdp::testing
