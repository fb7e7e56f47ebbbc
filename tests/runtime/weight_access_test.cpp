// Reading the elements and the properties of weights inside of a region.

#include "harness/grouping.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

namespace fsdp::testing {
namespace weight_access {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// Three matrices, each a unit, and what they were before they were sharded.
struct Matrices {
  Tensor a = random_parameter({9, 9});
  Tensor b = random_parameter({9, 9});
  Tensor c = random_parameter({9, 9});
  std::vector<Tensor> values = {
      a.detach().clone(),
      b.detach().clone(),
      c.detach().clone()};

  NamedUnits units() const {
    return unit_per_tensor({{"a", a}, {"b", b}, {"c", c}});
  }
};

/// Runs `body` in a region, without gradients, in worlds of 1 to 3 ranks.
void in_regions(
    const std::function<void(const Matrices&)>& body,
    const std::vector<Strategy>& strategies = kAllStrategies) {
  for (const int world_size : {1, 2, 3}) {
    for (const auto strategy : strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      const auto rank_main = [&](const World& world) {
        std::optional<Matrices> matrices;
        build([&] {
          matrices.emplace();
          return TestModel();
        });
        ShardedTensors net(
            matrices->units(), world, Options().strategy(strategy));
        const torch::NoGradGuard no_grad;
        net.call([&] { body(*matrices); });
      };
      ASSERT_NO_THROW(
          run_ranks(world_size, rank_main, std::chrono::seconds(20)));
    }
  }
}

std::string text_of(const Tensor& tensor) {
  std::ostringstream text;
  text << tensor;
  return text.str();
}

TEST(WeightAccess, PrintsAsAnUnshardedTensor) {
  in_regions([](const Matrices& m) {
    EXPECT_EQ(text_of(m.a), text_of(m.values[0]));
    EXPECT_EQ(
        text_of(m.b.narrow(0, 2, 3)), text_of(m.values[1].narrow(0, 2, 3)));
  });
}

TEST(WeightAccess, ItemsAndComparisons) {
  in_regions([](const Matrices& m) {
    EXPECT_EQ(m.a[1][2].item<float>(), m.values[0][1][2].item<float>());
    EXPECT_EQ(m.c.index({2, 3}).item<float>(), m.values[2][2][3].item<float>());
    EXPECT_TRUE(at::equal(m.a, m.values[0]));
    EXPECT_FALSE(at::equal(m.a, m.b));
    EXPECT_TRUE(at::allclose(m.b, m.values[1]));
    EXPECT_EQ(at::is_nonzero(m.c[0][0]), true);
  });
}

TEST(WeightAccess, AccessorRightAfterUse) {
  in_regions([](const Matrices& m) {
    m.a.sum();
    const auto accessor = m.a.accessor<float, 2>();
    EXPECT_EQ(accessor[1][2], m.values[0][1][2].item<float>());
    EXPECT_EQ(accessor[8][8], m.values[0][8][8].item<float>());
  });
}

const std::vector<Strategy> kReleasing = {Strategy::kFullShard};

TEST(WeightAccess, AccessorOfAWeightThatWasReleasedIsAnError) {
  const auto body = [](const Matrices& m) {
    m.a.sum();
    m.b.sum();
    m.c.sum(); // two units may be whole at once
    const auto error = error_of([&] { m.a.accessor<float, 2>(); });
    EXPECT_NE(error.find("unit of a"), std::string::npos) << error;
    EXPECT_NE(error.find("fsdp::touch"), std::string::npos) << error;
    EXPECT_EQ(m.a.sum().item<float>(), m.values[0].sum().item<float>());
  };
  in_regions(body, kReleasing);
}

TEST(WeightAccess, PointerOfAWeightThatWasNeverUsedIsAnError) {
  const auto body = [](const Matrices& m) {
    const auto error = error_of([&] { m.b.data_ptr<float>(); });
    EXPECT_NE(error.find("unit of b"), std::string::npos) << error;
    EXPECT_NE(error_of([&] { m.b.data_ptr(); }), "");
    EXPECT_NE(error_of([&] { m.b.const_data_ptr<float>(); }), "");
    EXPECT_NE(error_of([&] { m.b.t().data_ptr(); }), "");
  };
  in_regions(body, kReleasing);
}

TEST(WeightAccess, TouchKeepsAPointerValid) {
  in_regions([](const Matrices& m) {
    const auto kept = touch(m.a);
    const auto* data = m.a.const_data_ptr<float>();
    const std::vector<float> before(data, data + m.a.numel());
    m.b.sum();
    m.c.sum();
    EXPECT_EQ(m.a.const_data_ptr<float>(), data);
    const std::vector<float> after(data, data + m.a.numel());
    const auto* expected = m.values[0].const_data_ptr<float>();
    EXPECT_EQ(before, std::vector<float>(expected, expected + m.a.numel()));
    EXPECT_EQ(after, before);
  });
}

TEST(WeightAccess, ContiguousAndFlattenedCopies) {
  in_regions([](const Matrices& m) {
    const auto flat = m.a.t().contiguous().flatten();
    m.b.sum();
    m.c.sum(); // a copy does not depend on the weight that it was made from
    EXPECT_TRUE(at::equal(flat, m.values[0].t().contiguous().flatten()));
    const auto copy = m.a.to(at::kDouble);
    EXPECT_TRUE(at::equal(copy, m.values[0].to(at::kDouble)));
  });
}

void expect_type(const Tensor& tensor, at::ScalarType type) {
  EXPECT_EQ(tensor.scalar_type(), type);
  EXPECT_EQ(tensor.dtype(), c10::scalarTypeToTypeMeta(type));
  EXPECT_EQ(tensor.toString(), torch::empty({1}, type).toString());
  EXPECT_EQ(tensor.layout(), at::kStrided);
  EXPECT_TRUE(tensor.is_cpu());
  EXPECT_TRUE(tensor.options().type_equal(at::TensorOptions(type)));
}

TEST(WeightAccess, PropertiesInsideAndOutsideOfRegions) {
  const auto a = random_parameter({9, 8});
  ShardedTensors net(
      unit_per_tensor({{"a", a}}),
      World(),
      Options().mixed_precision({.param_dtype = at::kBFloat16}));
  expect_type(a, at::kFloat);
  {
    const auto region = net.region();
    expect_type(a, at::kBFloat16);
    EXPECT_EQ(a.size(1), 8);
    EXPECT_EQ(a.stride(0), 8);
    EXPECT_TRUE(a.is_leaf());
    EXPECT_TRUE(a.requires_grad());
  }
  expect_type(a, at::kFloat);
  EXPECT_EQ(a.dim(), 1);
}

TEST(WeightAccess, FactoriesLikeAShardHaveItsSize) { // state of an optimizer
  run_ranks(
      2,
      [](const World& world) {
        Tensor a;
        build([&] {
          a = random_parameter({9, 9});
          return TestModel();
        });
        ShardedTensors net(unit_per_tensor({{"a", a}}), world);
        const int64_t mine = world.rank() == 0 ? 64 : 17;
        EXPECT_EQ(torch::zeros_like(a).numel(), mine);
        EXPECT_EQ(torch::empty_like(a).numel(), mine);
        EXPECT_EQ(torch::full_like(a, 2).sum().item<float>(), 2.F * mine);
        EXPECT_FALSE(torch::zeros_like(a).requires_grad());
        const auto region = net.region();
        EXPECT_EQ(torch::zeros_like(a).sizes(), (std::vector<int64_t>{9, 9}));
        EXPECT_EQ(net.gathers(), 0); // it reads no element
      },
      std::chrono::seconds(20));
}

TEST(WeightAccess, CloneOfAModuleInARegionIsAWholePlainModule) {
  run_ranks(
      3,
      [](const World& world) {
        nn::Linear linear(nullptr);
        build([&] {
          linear = nn::Linear(9, 9);
          return TestModel();
        });
        const auto x = torch::ones({2, 9});
        const auto expected = linear(x).detach();
        ShardedTensors net(
            unit_per_parameter({{"linear", linear.ptr()}}), world);
        const auto clone = net.call([&] {
          return std::dynamic_pointer_cast<nn::LinearImpl>(linear->clone());
        });
        const auto y = clone->forward(x); // outside of the region
        EXPECT_TRUE(at::equal(y, expected));
        y.sum().backward();
        EXPECT_EQ(clone->weight.grad().sizes(), (std::vector<int64_t>{9, 9}));
        EXPECT_FALSE(linear->weight.grad().defined());
      },
      std::chrono::seconds(20));
}

} // namespace
} // namespace weight_access
} // namespace fsdp::testing
