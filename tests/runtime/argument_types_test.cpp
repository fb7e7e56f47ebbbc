// Operators with arguments of every type that the dispatcher boxes.

#include "harness/chain.h"

#include <ATen/CPUGeneratorImpl.h>

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Results of operators on two weights, in a fixed order.
using Operators =
    std::function<std::vector<Tensor>(const Tensor& w, const Tensor& other)>;

struct Two {
  Tensor w = torch::randn({4, 6}).requires_grad_();
  Tensor other = torch::randn({4, 6}).requires_grad_();
};

std::shared_ptr<Two> build_two() {
  const auto model = build([] {
    TestModel result;
    result.owner = std::make_shared<Two>();
    return result;
  });
  return std::static_pointer_cast<Two>(model.owner);
}

void expect_same_results(const Operators& operators) {
  const auto plain = build_two();
  std::vector<Tensor> expected;
  {
    const torch::NoGradGuard no_grad;
    expected = operators(plain->w, plain->other);
  }
  for (const int world_size : {1, 2, 3, 4}) {
    SCOPED_TRACE("world size " + std::to_string(world_size));
    const auto rank_main = [&](const World& world) {
      const auto two = build_two();
      ShardedTensors net(
          {{"w", {{"w", two->w}}}, {"other", {{"other", two->other}}}},
          world,
          Options().slots(1));
      const torch::NoGradGuard no_grad;
      net.call([&] {
        const auto results = operators(two->w, two->other);
        ASSERT_EQ(results.size(), expected.size());
        for (size_t i = 0; i < results.size(); ++i) {
          EXPECT_TRUE(at::equal(results[i], expected[i])) << i;
        }
      });
      const auto values = whole_values(net);
      EXPECT_TRUE(at::equal(values[0].second, plain->w));
      EXPECT_TRUE(at::equal(values[1].second, plain->other));
    };
    ASSERT_NO_THROW(run_ranks(world_size, rank_main, kWaitLimit));
  }
}

at::Generator generator() {
  return at::make_generator<at::CPUGeneratorImpl>(3);
}

TEST(ArgumentTypes, NumbersStringsAndEnumerations) {
  expect_same_results([](const Tensor& w, const Tensor& other) {
    return std::vector<Tensor>{
        at::div(w, other, "floor"),
        at::bernoulli(at::sigmoid(w), generator()),
        w.clone(at::MemoryFormat::Contiguous),
        w.sum(at::IntArrayRef{0, 1}, false, at::kDouble),
        at::norm(w, 2.5, {0}, true),
        at::quantile(w, 0.3),
        at::pad(w, {1, 1}, "constant", 2.0),
        at::searchsorted(std::get<0>(w.flatten().sort()), 0.1),
        at::linalg_norm(w, "fro"),
        at::einsum("ij,kj->ik", {w, other})};
  });
}

TEST(ArgumentTypes, ListsAndOptionals) {
  expect_same_results([](const Tensor& w, const Tensor& other) {
    auto results = std::vector<Tensor>{
        std::get<0>(at::histogram(w, 10, std::vector<double>{-1., 1.})),
        w.index({Tensor(), torch::tensor({1, 2})}),
        w.index({torch::tensor({true, false, true, true})}),
        at::upsample_nearest2d(
            w.view({1, 1, 4, 6}),
            std::optional<at::IntArrayRef>(),
            std::vector<double>{2., 2.}),
        at::stft(w.flatten(), 8, 4, 8, Tensor(), false, true, true),
        at::stack({w, other, w}),
        at::layer_norm(w, {6}, other.select(0, 0), {}),
        at::clamp(w, other.select(0, 0), std::optional<Tensor>()),
        at::block_diag({w, other}),
        at::cartesian_prod({w.select(0, 0), other.select(0, 1)})};
    for (auto& each : at::_foreach_add({w, other}, {other, w})) {
      results.push_back(each);
    }
    for (auto& each :
         at::meshgrid({w.select(0, 0), other.select(0, 0)}, "ij")) {
      results.push_back(each);
    }
    return results;
  });
}

TEST(ArgumentTypes, OutputsAndWrites) {
  expect_same_results([](const Tensor& w, const Tensor& other) {
    std::vector<Tensor> results;
    w.normal_(0, 1, generator());
    results.push_back(w.clone());
    w.random_(0, 5, generator());
    results.push_back(w.clone());
    w.zero_();
    w.fill_(other.mean());
    results.push_back(w.clone());
    auto out = torch::empty({0});
    at::add_out(out, w, other);
    results.push_back(out);
    auto values = torch::empty({0});
    auto indices = torch::empty({0}, at::kLong);
    at::max_out(values, indices, other, 1);
    results.push_back(values);
    results.push_back(indices);
    return results;
  });
}

TEST(ArgumentTypes, StorageThatReplacesAWeight) {
  expect_same_results([](const Tensor& w, const Tensor& other) {
    auto values = torch::full({24}, 2.0);
    w.set_(values.storage(), 0, {4, 6}, {6, 1});
    return std::vector<Tensor>{w + other};
  });
}

} // namespace
} // namespace fsdp::testing
