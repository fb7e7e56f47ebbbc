// The type of what a net returns.

#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace output_type {

namespace nn = torch::nn;
using at::Tensor;

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
      return net.call(
          [&](ResultsImpl& module) { return body(module.forward(x)); });
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
    const auto output = run([](const Tensor& t) {
      return Output{t, {t, t}, 3};
    });
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
    const auto make = [] { return std::make_shared<ResultsImpl>(); };
    MixedPrecision policy = {
        .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    FullyShardedDataParallel by_hand(
        seeded(make), world, Options().mixed_precision(policy));
    policy.output_dtype = at::kFloat;
    FullyShardedDataParallel cast(
        seeded(make), world, Options().mixed_precision(policy));
    cast(wave({4, 7})).pow(2).mean().backward();
    by_hand(wave({4, 7})).to(at::kFloat).pow(2).mean().backward();
    expect_same_bits(whole_gradients(by_hand), whole_gradients(cast));
  });
}

} // namespace output_type
} // namespace fsdp::testing
