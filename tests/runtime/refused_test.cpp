// What programs do with parameters outside of regions: an error that says what
// to do, or the contents of this rank's shard where these are meant.

#include "harness/chain.h"

#include <sstream>

namespace fsdp::testing {
namespace {

using at::Tensor;

std::string rank_of(const ShardedTensors& net) {
  return "rank " + std::to_string(net.world().rank()) + "/" +
      std::to_string(net.world().size());
}

TEST(Outside, ForwardWithoutARegionIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto local = net.describe().units[0].parameters[0].local_numel;
        EXPECT_TRUE(fails_with(
            [&] { chain.forward(chain.x); },
            {"aten::t",
             "'layer0.weight'",
             "outside of a region",
             "a shard of " + std::to_string(local) + " elements",
             rank_of(net),
             "net(x)",
             "net.call(...)",
             "net.region()"}));
      },
      split_strategies());
}

TEST(Outside, ForwardOfReplicatedParametersWorks) {
  ChainTraining training;
  training.settings.strategies = {Strategy::kNoShard};
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step == 1) { // also the gradients of such a pass are reduced
      const auto rows =
          net == nullptr ? torch::arange(kRows) : rows_of_rank(net->world());
      chain.loss(rows).backward();
    }
  };
  expect_same_training(training);
}

TEST(Outside, ShardThatWouldBroadcastIsRefused) {
  run_ranks(
      2,
      [](const World& world) {
        const auto scale = torch::ones({65}).requires_grad_();
        ShardedTensors net({{"root", {{"scale", scale}}}}, world);
        EXPECT_EQ(scale.numel(), world.rank() == 0 ? 64 : 1);
        const auto x = torch::ones({4, scale.numel()});
        EXPECT_TRUE(fails_with(
            [&] { (x * scale).sum(); },
            {"aten::mul",
             "'scale'",
             "a shard of " + std::to_string(scale.numel()) + " elements"}));
        EXPECT_EQ(
            net.call([&] {
                 return (torch::ones({4, 65}) * scale).sum();
               })
                .item<float>(),
            260.0F);
      },
      kWaitLimit);
}

TEST(Outside, ShardOfAFrozenParameterThatWouldBroadcastIsRefused) {
  run_ranks(
      2,
      [](const World& world) {
        const auto scale = torch::ones({65});
        ShardedTensors net({{"root", {{"scale", scale}}}}, world);
        const auto x = torch::ones({4, scale.numel()}).requires_grad_();
        EXPECT_TRUE(fails_with(
            [&] { (x * scale).sum(); },
            {"aten::mul", "'scale'", "outside of a region"}));
        const torch::NoGradGuard no_grad; // updates of shards
        EXPECT_EQ((scale * 2).sum().item<float>(), 2.0F * scale.numel());
      },
      kWaitLimit);
}

TEST(Outside, RegulariserOverParametersIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto names = rank_of(net);
        EXPECT_TRUE(fails_with(
            [&] { chain.weight(2).pow(2).sum(); },
            {"aten::pow", "'layer2.weight'", names}));
        EXPECT_TRUE(fails_with(
            [&] { chain.bias(1).norm(); },
            {"aten::norm", "'layer1.bias'", names}));
        EXPECT_TRUE(fails_with(
            [&] { chain.x.mm(chain.weight(3)); },
            {"aten::mm", "'layer3.weight'", names}));
        EXPECT_TRUE(fails_with(
            [&] {
              torch::cat({chain.weight(0), chain.weight(1)});
            },
            {"aten::cat", "'layer0.weight'", names}));
        EXPECT_TRUE(fails_with(
            [&] { torch::nn::utils::parameters_to_vector(chain.parameters()); },
            {"'layer0.weight'", names}));
      },
      split_strategies());
}

/// This rank's part of `name`, out of its whole value.
Tensor part_of(
    const ShardedTensors& net,
    const std::string& name,
    const Tensor& whole,
    const Tensor& shard) {
  int64_t begin = 0; // the shards of a parameter lie in rank order
  const auto sizes =
      net.world().communicator().exchange(std::to_string(shard.numel()), name);
  for (int rank = 0; rank < net.world().rank(); ++rank) {
    begin += std::stol(sizes[rank]);
  }
  return whole.flatten().narrow(0, begin, shard.numel());
}

TEST(Outside, GradientOfAnotherSizeIsRefusedByName) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto rows = rows_of_rank(net.world());
        const auto whole_gradient = torch::zeros({15 * 15 + 1});
        auto weight = chain.weight(1);
        weight.unsafeGetTensorImpl()->mutable_grad() = whole_gradient;
        EXPECT_TRUE(fails_with(
            [&] { net.call([&] { return chain.loss(rows); }).backward(); },
            {".grad of parameter 'layer1.weight' has 226 elements",
             "zero_grad()"}));
        for (auto& parameter : chain.parameters()) {
          EXPECT_EQ(
              parameter.grad().defined(), parameter.is_same(chain.weight(1)));
        }
        chain.weight(1).mutable_grad().reset();
      },
      split_strategies());
}

TEST(Outside, ShardsMayBeShownAndCopiedWithAutogradOn) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto& weight = chain.weight(1);
        const auto whole = whole_values(net)[2].second;
        const auto expected = part_of(net, "shards", whole, weight);
        EXPECT_TRUE(at::equal(weight.detach(), expected));
        EXPECT_TRUE(at::equal(at::alias(weight.detach()), expected));
        EXPECT_TRUE(at::equal(weight.clone().detach(), expected));
        EXPECT_TRUE(at::equal(weight.contiguous().detach(), expected));
        EXPECT_TRUE(at::equal(
            weight.to(at::kDouble).detach(), expected.to(at::kDouble)));
        EXPECT_TRUE(at::equal(weight.cpu().detach(), expected));
        auto copy = torch::empty({weight.numel()});
        copy.copy_(weight);
        EXPECT_TRUE(at::equal(copy.detach(), expected));
        std::ostringstream text;
        std::ostringstream expected_text;
        text << weight;
        expected_text << expected;
        EXPECT_EQ(text.str(), expected_text.str());
      },
      split_strategies());
}

TEST(Outside, SizesAreThoseOfTheShard) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto units = net.describe().units;
        int64_t total = 0;
        for (size_t i = 0; i < units.size(); ++i) {
          EXPECT_EQ(
              chain.weight(i).sizes(),
              at::IntArrayRef({units[i].parameters[0].local_numel}));
          EXPECT_EQ(
              net.full_sizes("layer" + std::to_string(i) + ".weight"),
              (std::vector<int64_t>{15, 15}));
          total += chain.weight(i).numel() + chain.bias(i).numel();
        }
        EXPECT_NEAR(
            mean_over_ranks(net.world(), static_cast<double>(total)) *
                net.world().size(),
            4 * (15 * 15 + 15),
            1e-9);
        net.call([&] {
          EXPECT_EQ(chain.weight(0).sizes(), at::IntArrayRef({15, 15}));
        });
      },
      split_strategies());
}

TEST(Outside, ViewThatLeftItsRegionIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        Tensor view;
        Tensor detached;
        Tensor inner;
        net.call([&] {
          view = chain.weight(1).t();
          detached = chain.weight(2).detach();
          inner = chain.bias(3).narrow(0, 2, 4);
        });
        const std::vector<std::string> advice = {
            "outside of a region", rank_of(net), "clone()", "net.region()"};
        const auto refused = [&](const Tensor& each, const std::string& name) {
          auto parts = advice;
          parts.push_back("'" + name + "', or a view of it");
          EXPECT_TRUE(fails_with([&] { each.sum(); }, parts));
          const torch::NoGradGuard no_grad;
          EXPECT_TRUE(fails_with([&] { each.sum(); }, parts));
        };
        refused(view, "layer1.weight");
        refused(detached, "layer2.weight");
        refused(inner, "layer3.bias");
      },
      split_strategies());
}

} // namespace
} // namespace fsdp::testing
