// Values computed only from weights are not kept for backward.

#include "harness/counting_allocator.h"
#include "harness/parity.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace derived_values {
namespace {

using at::Tensor;

constexpr int64_t kWidth = 96;
constexpr int64_t kWeightBytes = kWidth * kWidth * 4;

struct Weights {
  std::vector<Tensor> w;
  Tensor x;

  explicit Weights(at::ScalarType dtype)
      : x(torch::randn({kRows, kWidth}, dtype)) {
    for (int i = 0; i < 6; ++i) {
      w.push_back(
          (torch::randn({kWidth, kWidth}, dtype) * 0.1).requires_grad_());
    }
  }
  NamedUnits units() const {
    NamedUnits result;
    for (size_t i = 0; i < w.size(); ++i) {
      const auto name = "w" + std::to_string(i);
      result.push_back({name, {{name, w[i]}}});
    }
    return result;
  }
};

using Loss = std::function<Tensor(Weights&, const Tensor& x)>;

MakeModel weights_with(const Loss& loss, at::ScalarType dtype = at::kFloat) {
  return [loss, dtype] {
    const auto owner = std::make_shared<Weights>(dtype);
    return TestModel{
        owner->units(),
        [owner, loss](const Tensor& rows) {
          return loss(*owner, owner->x.index_select(0, rows));
        },
        owner};
  };
}

/// Bytes that the graph holds after forward, over the bytes of the weights.
double kept_share(const Loss& loss) {
  auto model = build(weights_with(loss));
  ShardedTensors net(model.units);
  MemoryAccount account;
  double share = 0.0;
  {
    const BookedOn booked(account);
    const auto value = net.call([&] { return model.loss(torch::arange(2)); });
    share = static_cast<double>(account.live_bytes) / (6 * kWeightBytes);
    value.backward();
    for (const auto& parameter : net.parameters()) {
      parameter.mutable_grad().reset();
    }
  }
  return share;
}

class Autocast {
 public:
  Autocast() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_cache_enabled(true);
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
  }
};

Tensor transposed_copies(Weights& m, const Tensor& x) {
  auto y = x;
  for (const auto& w : m.w) {
    y = torch::tanh(y.mm(w.t().contiguous()));
  }
  return y.pow(2).mean();
}

Tensor normalised(Weights& m, const Tensor& x) {
  auto y = x;
  for (const auto& w : m.w) {
    y = torch::tanh(y.mm(w / w.norm()));
  }
  return y.pow(2).mean() * 100;
}

Tensor concatenated(Weights& m, const Tensor& x) {
  auto y = x.mm(torch::cat({m.w[0], m.w[1], m.w[2]}, 1));
  y = y.mm(torch::cat({m.w[3], m.w[4], m.w[5]}, 0));
  return y.pow(2).mean();
}

Tensor scaled_by_number(Weights& m, const Tensor& x) {
  auto y = x;
  for (const auto& w : m.w) {
    y = torch::tanh(y.mm((w * 2.0).t()));
  }
  return y.pow(2).mean();
}

Tensor weight_norm(Weights& m, const Tensor& x) {
  auto y = x;
  for (size_t i = 0; i + 1 < m.w.size(); i += 2) {
    const auto g = m.w[i + 1].select(1, 0).unsqueeze(1);
    y = torch::tanh(y.mm(at::_weight_norm(m.w[i], g, 0)));
  }
  return y.pow(2).mean();
}

Tensor under_autocast(Weights& m, const Tensor& x) {
  const Autocast autocast;
  auto y = x;
  for (const auto& w : m.w) {
    y = torch::tanh(torch::linear(y, w));
  }
  return y.to(at::kFloat).pow(2).mean();
}

TEST(DerivedValues, AreNotKeptForBackward) {
  // Activations of two rows remain: a few percent of these weights.
  EXPECT_LT(kept_share(transposed_copies), 0.1);
  EXPECT_LT(kept_share(normalised), 0.1);
  EXPECT_LT(kept_share(concatenated), 0.1);
  EXPECT_LT(kept_share(scaled_by_number), 0.1);
  EXPECT_LT(kept_share(weight_norm), 0.1);
  EXPECT_LT(kept_share(under_autocast), 0.1);
}

TEST(DerivedValues, GiveTheGradientsOfThePlainModel) {
  for (const auto& loss :
       {Loss(transposed_copies),
        Loss(concatenated),
        Loss(scaled_by_number),
        Loss(weight_norm)}) {
    ParitySettings settings;
    settings.learning_rate = 1e-3;
    expect_same_training(weights_with(loss), settings);
  }
}

TEST(DerivedValues, OfNormsGiveTheGradientsOfThePlainModel) {
  ParitySettings settings;
  settings.optimizer = Optimizer::kSgd;
  expect_same_training(weights_with(normalised), settings);
}

TEST(DerivedValues, MayBeWrittenToAfterwards) {
  expect_same_training(weights_with([](Weights& m, const Tensor& x) {
    auto copy = m.w[0] * 2.0;
    copy.mul_(0.5).add_(m.w[1]);
    return x.mm(copy).pow(2).mean();
  }));
}

TEST(DerivedValues, SecondDerivativesEqualThePlainModel) {
  const auto loss = [](Weights& m, const Tensor& x) {
    const auto input = x.detach().requires_grad_();
    auto y = input;
    for (const auto& w : m.w) {
      y = torch::tanh(y.mm((w * 2.0).t()));
    }
    const auto g = torch::autograd::grad({y.sum()}, {input}, {}, true, true)[0];
    return y.pow(2).mean() + g.pow(2).sum(1).mean();
  };
  // In float32 rounding alone, amplified, is more than the tolerance.
  expect_same_training(weights_with(loss, at::kDouble));
}

TEST(DerivedValues, OfChangedWeightsAreAnErrorInBackward) {
  auto model = build(weights_with(scaled_by_number));
  ShardedTensors net(model.units);
  const auto loss = net.call([&] { return model.loss(torch::arange(kRows)); });
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net.parameters()) {
      parameter.mul_(0.5);
    }
  }
  const auto error = error_of([&] { loss.backward(); });
  EXPECT_NE(error.find("modified by an inplace operation"), std::string::npos)
      << error;
}

TEST(DerivedValues, ActivationsChangedInPlaceAreAnErrorInBackward) {
  auto model = build(weights_with([](Weights& m, const Tensor& x) {
    const auto w = m.w[0] * 2.0; // tensors are saved through hooks from here on
    auto y = x.mm(w);
    auto z = y.pow(2);
    y.add_(1.0);
    return z.mean();
  }));
  ShardedTensors net(model.units);
  const auto loss = net.call([&] { return model.loss(torch::arange(kRows)); });
  const auto error = error_of([&] { loss.backward(); });
  EXPECT_NE(error.find("modified by an inplace operation"), std::string::npos)
      << error;
}

TEST(DerivedValues, GraphsWithThemAreFreed) {
  MemoryAccount account;
  {
    const BookedOn booked(account);
    auto model = build(weights_with([](Weights& m, const Tensor& x) {
      auto y = x;
      for (const auto& w : m.w) {
        y = torch::tanh(y.mm(w * 2.0)); // tanh saves its output
      }
      return y.pow(2).mean();
    }));
    ShardedTensors net(model.units);
    net.call([&] { return model.loss(torch::arange(kRows)); });
  }
  EXPECT_EQ(account.live_bytes, 0);
}

} // namespace
} // namespace derived_values
} // namespace fsdp::testing
