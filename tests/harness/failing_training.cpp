#include "harness/failing_training.h"

#include <gtest/gtest.h>

#include <map>
#include <stdexcept>

namespace fsdp::testing {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::tensor_list;

struct ThrowsInBackward : Function<ThrowsInBackward> {
  static at::Tensor
  forward(AutogradContext* context, at::Tensor x, std::string text) {
    context->saved_data["text"] = text;
    return x.clone();
  }
  static tensor_list backward(AutogradContext* context, tensor_list /*grads*/) {
    throw std::runtime_error(context->saved_data["text"].toStringRef());
  }
};

/// One rank of a training with failures.
class Trainer {
 public:
  Trainer(
      const World& world,
      Strategy strategy,
      const Break& breaks,
      const FailureSettings& settings)
      : world_(world),
        breaks_(breaks),
        settings_(settings),
        model_(build_model<BreakableLayers>()),
        net_(
            model_->units(),
            failing_world(world, injection_),
            Options().strategy(strategy)),
        optimizer_(
            net_.parameters(),
            torch::optim::SGDOptions(0.1).momentum(0.9)) {
    rows_ = rows_of_rank(world, settings.batch);
  }

  Training train() {
    Training training;
    for (int step = 0; step < settings_.steps; ++step) {
      for (int pass = 0; pass < 2; ++pass) {
        for (int i = 0; breaks_ && i < settings_.failures; ++i) {
          fail();
        }
        const auto loss = net_.call([&] { return model_->loss(rows_); });
        loss.backward();
        training.losses.push_back(mean_over_ranks(world_, loss.item<double>()));
      }
      optimizer_.step();
      optimizer_.zero_grad();
    }
    training.parameters = whole_values(net_);
    return training;
  }

 private:
  void fail() {
    const Snapshot before(net_);
    Breaking breaking{
        *model_,
        *injection_,
        world_.rank(),
        world_.size(),
        attempt_,
        "broken in attempt " + std::to_string(attempt_) + "."};
    ++attempt_;
    breaks_(breaking);
    const auto text = error_of([&] {
      const auto loss = net_.call([&] { return model_->loss(rows_); });
      if (loss.requires_grad()) {
        loss.backward();
      }
    });
    EXPECT_PRED_FORMAT2(::testing::IsSubstring, breaking.text, text);
    before.expect_unchanged(net_);
    model_->place = Place::kNowhere;
    model_->backward_in_region = false;
    injection_->disarm();
  }

  World world_;
  const Break& breaks_;
  const FailureSettings& settings_;
  std::shared_ptr<BreakableLayers> model_;
  std::shared_ptr<Injection> injection_ = std::make_shared<Injection>();
  ShardedTensors net_;
  torch::optim::SGD optimizer_;
  at::Tensor rows_;
  int attempt_ = 0;
};

} // namespace

BreakableLayers::BreakableLayers() {
  for (size_t i = 0; i < layers.size(); ++i) {
    weight(i).register_hook([this, i](const at::Tensor& /*gradient*/) {
      if (breaks(Place::kParameterHook, i)) {
        throw std::runtime_error(text);
      }
    });
  }
}

at::Tensor BreakableLayers::loss(const at::Tensor& rows) {
  auto y = input(rows);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (breaks(Place::kForward, i)) {
      throw std::runtime_error(text);
    }
    y = torch::tanh(layers[i]->forward(y));
    if (breaks(Place::kFunction, i)) {
      y = ThrowsInBackward::apply(y, text);
    }
    if (breaks(Place::kActivationHook, i)) {
      y.register_hook([message = text](const at::Tensor& gradient) {
        throw std::runtime_error(message);
        return gradient;
      });
    }
  }
  const auto result = y.pow(2).mean();
  if (!backward_in_region) {
    return result;
  }
  result.backward();
  if (place == Place::kAfterBackward) {
    throw std::runtime_error(text);
  }
  return result.detach();
}

std::map<int, Training> train_with_failures(
    int world_size,
    Strategy strategy,
    const Break& breaks,
    const FailureSettings& settings) {
  return results_of_ranks(
      world_size,
      [&](const World& world) {
        SCOPED_TRACE(
            "strategy " + std::to_string(static_cast<int>(strategy)) +
            ", rank " + std::to_string(world.rank()) + " of " +
            std::to_string(world.size()));
        return Trainer(world, strategy, breaks, settings).train();
      },
      std::chrono::seconds(20));
}

void expect_failures_leave_no_trace(
    const std::vector<int>& world_sizes,
    const std::vector<Strategy>& strategies,
    const Break& breaks,
    const FailureSettings& settings) {
  for (const int world_size : world_sizes) {
    for (const auto strategy : strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      std::map<int, Training> clean;
      std::map<int, Training> broken;
      ASSERT_NO_THROW(
          clean = train_with_failures(world_size, strategy, nullptr, settings));
      ASSERT_NO_THROW(
          broken = train_with_failures(world_size, strategy, breaks, settings));
      ASSERT_EQ(clean.size(), broken.size());
      for (const auto& [rank, training] : clean) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_identical(training, broken.at(rank));
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
  }
}

void BreakableRank::expect_pass_works() {
  EXPECT_EQ(error_of([&] { pass(); }), "");
  EXPECT_TRUE(m->weight(1).grad().defined());
}

Snapshot::Snapshot(ShardedTensors& net) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : net.parameters()) {
    const auto& gradient = parameter.grad();
    states_.push_back(
        {parameter.detach().clone(),
         gradient,
         gradient.defined() ? gradient.clone() : at::Tensor()});
  }
}

void Snapshot::expect_unchanged(ShardedTensors& net) const {
  const torch::NoGradGuard no_grad;
  const auto memory = net.memory();
  if (!keeps_whole_weights(net)) {
    EXPECT_EQ(memory.gathered_bytes, 0);
  }
  EXPECT_EQ(memory.unreduced_gradient_bytes, 0);
  const auto parameters = net.parameters();
  ASSERT_EQ(parameters.size(), states_.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& state = states_[i];
    ASSERT_EQ(parameters[i].sizes(), state.value.sizes()) << "parameter " << i;
    EXPECT_TRUE(at::equal(parameters[i], state.value)) << "parameter " << i;
    const auto& gradient = parameters[i].grad();
    ASSERT_EQ(gradient.defined(), state.gradient.defined())
        << "gradient of parameter " << i;
    if (gradient.defined()) {
      EXPECT_TRUE(gradient.is_same(state.gradient));
      EXPECT_TRUE(at::equal(gradient, state.gradient_value))
          << "gradient of parameter " << i;
    }
  }
}

} // namespace fsdp::testing
